// made from analysis/page/schema.py by python -m attnflow.analysis.page.types

/** Numbers of 16 bits, little endian, in base64. */
interface Packed {
  shape: number[];
  float16?: string;  // The bytes as they are.
  deflated?: string;  // All high bytes before all low ones, then deflated.
}

/** Rows of some positions. */
interface Rows {
  positions: number[];
  values: Packed;  // [layer, query, key]
}

/** Rows of all positions as tiles: means over queries of sums over keys. */
interface Tiles {
  starts: number[];
  values: Packed;  // [layer, tile, tile]
}

/** By unit, the average of shares over even shares: [2, layer, key]. The mean over the rows that see the key, and the number of these rows. */
interface Others {
  without: Record<string, Packed>;  // For shares without the positions that are left out.
  with?: Record<string, Packed>;  // For shares with them; not given for long texts.
}

/** The rows to words and to sentences. */
interface Grouped {
  word?: Rows;
  sentence?: Rows;
}

/** A maximum flow from the explained position in the top layer to some positions. */
interface Flow {
  target: number[];
  value: number;
  edges: [number, number, number, number, number][];  // The strongest edges and the cut: [layer, query, key, amount, 1 if in the cut].
}

/** One result. */
interface PageMethod {
  name: string;
  title: string;
  meaning: string;
  method: string;  // The name of the method, without its edges.
  edges: string;
  graph: number | null;  // The number of its graph.
  computed?: "raw" | "rollout";  // The method that the page runs on the graph itself.
  rows?: Rows;  // The rows that the page does not compute.
  others?: Others;
  tiles?: Tiles;
  grouped?: Grouped;  // The rows of the explained position, if a word is not the sum of its tokens.
  saturated?: number[][];  // [layer, query]: 1 where most of a row is at its bound.
  even?: Record<string, number[][]>;  // By unit, [layer, query]: 1 where a row says nothing, without the positions that are left out. The queries are the explained position, or all generated tokens.
  flows?: Flow[];  // The maximum flows to what the explained position reads most.
  sumsToOne?: boolean;  // For a generation: whether the rest of a row lies outside of the prompt.
}

/** One importance, by token and by word. */
interface PageImportance {
  name: string;
  title: string;
  meaning: string;
  target: string;
  probability: number;
  signed: boolean;
  values: number[];
  words: number[] | null;
  score?: number;  // The logit, or difference of logits, that was watched instead of the probability.
}

/** A graph that methods ran on. */
interface PageGraph {
  edges: string;
  residual: number | null;  // None if the edges include it.
  weights?: Packed;  // [layer, query, key] before the residual is mixed in, or edges that include it, as shares.
  tops?: number[];  // The top layer of every band.
  bands?: Packed;  // [band, query, key]: the shares that travel from the top of a band to that of the next one.
}

/** The graphs and the weights of every head, if they fit into a page. */
interface Graphs {
  graphs?: PageGraph[];
  heads?: Packed;  // [layer, head, query, key]
}

/** The patches of a vision model, row by row, and the picture below them. */
interface PagePicture {
  down: number;
  across: number;
  patches: number[];  // The positions of the patches.
  source: string | null;  // The picture, as a data URL.
  width: number;
  height: number;
}

/** The two texts of an encoder-decoder. */
interface PageParts {
  target: number;  // The first position of the target.
}

/** The positions of every word and of every sentence. */
interface Units {
  word: number[][];
  sentence: number[][];
}

/** The tokens, and their words and sentences. */
interface Tokens {
  tokens: string[];
  names: string[];  // The tokens as they are shown.
  special: number[];  // 1 for special tokens, such as CLS and SEP.
  starts: number[];  // 1 where a token begins a word.
  units: Units;
  asides: number[];  // The positions that shares leave out: sinks, special tokens, the explained one.
  segments?: string[];  // The names of the sentences, if these are the turns of a chat.
}

/** The layers, and which keys a query sees in them. */
interface PageLayers {
  removed: number[];  // The positions that were taken out of the graph.
  depth: number;
  size: number;
  causal: boolean;
  window: (number | null)[];  // By layer, how far back a query sees; None for all keys.
  layers: string[] | null;  // The names of the layers, if they have names.
}

/** The thresholds of what the page says and draws. */
interface Limits {
  even: number;  // The spread below which a row says nothing, ...
  peak: number;  // ... if its largest share is also below this many times the even share.
  few: number;  // The number of tokens below which a row is not judged.
  doublings: number;  // The number of doublings of the expectation at the end of the scale.
  doubtful: number;  // The rank correlation with blank-out below which a method is doubted.
  resting: number;  // The number of tokens up to which the graph is drawn at rest.
  share: number;  // The share of the mass that the paths carry at first.
  edges: number;  // The maximum number of edges that are drawn.
  fold: number;  // The number of tokens above which the text folds into sentences.
  rows: number;  // The number of positions up to which the page computes the rows of all.
  hover: number;  // The number of edges up to which paths follow the pointer.
  table: number;  // The number of rows that a table shows at first.
  lines: number;  // The number of tokens that are followed over the layers.
  flows: number;  // The number of tokens, words and sentences each whose maximum flows are given.
}

/** The scales from weak to strong, in light and dark mode; and the colours of lines. */
interface Colours {
  light: string[];
  dark: string[];
  lightAgainst: string[];
  darkAgainst: string[];
  lines?: string[];
}

/** The data of the page of an explanation or of a generation. */
interface Page extends Tokens, PageLayers, Graphs {
  kind: "explanation" | "generation";
  text: string;
  model: string;
  summary: string;
  prediction: [string, number] | null;  // Label and probability.
  position: number;  // The explained position; of a generation, the one that predicted its first token.
  normalize: string | null;
  methods: PageMethod[];
  first: string;
  sinks: [number, number][];  // The position and the share of each.
  agreement: Record<string, number>;  // By result, its rank correlation with blank-out.
  importance: PageImportance[];
  picture: PagePicture | null;
  parts: PageParts | null;
  notes: string[];
  source: string;
  span?: number[];  // The positions that are explained together, `position` the last of them; none if one is.
  prompt?: number;  // For a generation: the number of prompt tokens.
  probabilities?: number[];  // The probabilities of the generated tokens.
  limits: Limits;
  colours?: Colours;  // Filled in where the page is drawn.
}

/** One of two explanations. */
interface PageSide {
  name: string;
  method: string;
  layer: number;
  model: string;
  prediction: [string, number] | null;
  leftOut: number;  // The share of the positions that are left out.
}

/** Two aligned tokens or words; None for what a side lacks or leaves out. */
interface PagePair {
  left: string | null;
  right: string | null;
  values: [number | null, number | null];
  difference: number | null;
}

/** A text in colours. */
interface PageStrip {
  words: string[];
  spaces: number[];  // 1 where a space comes before a word.
  tones: (number | null)[];  // The colours, from -1 to 1; None for no colour.
}

/** A row of the table. */
interface Entry extends Partial<PageStrip> {
  page: string | null;  // The address that the first cell links to.
  cells: (string | number | null)[];
}

/** The data of a page of strips. */
interface Strips {
  kind: "pair" | "corpus";
  title: string;
  kicker: string;
  caption: string;
  notes: string[];
  columns: string[];
  entries: Entry[];
  back?: string;  // The address of the page that lists all texts.
  unit?: string;  // The unit that is aligned: "token" or "word".
  sides?: [PageSide, PageSide];
  pairs?: PagePair[];
  colours?: Colours;  // Filled in where the page is drawn.
}
