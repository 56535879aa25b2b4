"""The words that fill the slots of prompts; those that are not one token for a model are left out.

They were chosen, as the templates were, before any method was measured on them.
"""

FIRST_NAMES = """
    Alice Anna Bob Carl Charlie Chris Daniel David Emma Frank Fred George Grace Harry Helen
    Henry Jack James Jane John Julia Kate Laura Linda Lisa Lucy Maria Mark Martin Mary Michael
    Paul Peter Robert Rose Sam Sarah Simon Susan Thomas Tom
""".split()
OBJECTS = """
    apple bag ball basket bell book bottle bowl box bread camera candle card chair clock coat
    coin cup desk drum flag flower glass guitar hammer hat jacket key knife ladder lamp map
    mirror needle orange paper pen pencil phone piano picture plate ring rope shirt shoe spoon
    stone table umbrella watch wheel
""".split()
ANIMALS = """
    bear bird cat cow deer dog dolphin duck eagle elephant fish fox frog goat goose horse lion
    monkey mouse owl pig rabbit rat shark sheep snake spider tiger turtle whale wolf
""".split()
RELATIVES = """
    aunt boss brother cousin daughter doctor father friend grandfather grandmother husband
    landlord lawyer mother neighbor nephew partner sister son teacher uncle wife
""".split()
LOCKED = """
    account bank box cabinet car computer door garage gate house laptop library network office
    phone printer safe school server shop studio tablet vault website
""".split()
CODES = """
    apple banana blue bridge butter castle cherry circle cloud coffee copper crystal diamond
    dragon eagle falcon forest garden gold green honey island lemon lion magic maple marble moon
    mountain ocean olive orange panther pepper phoenix purple red river robin rocket rose salt
    shadow silver snow spring star storm summer sun sunset thunder tiger tulip velvet violet
    water whisper winter wolf yellow
""".split()
PLACES = """
    airport bakery bank beach bridge cafe church cinema garden gym hospital hotel library market
    mall museum office park restaurant river school shop station store theater zoo
""".split()
# singular and plural
COUNT_NOUNS = {
    "actor": "actors",
    "author": "authors",
    "book": "books",
    "boy": "boys",
    "car": "cars",
    "chair": "chairs",
    "cup": "cups",
    "dog": "dogs",
    "doctor": "doctors",
    "farmer": "farmers",
    "girl": "girls",
    "horse": "horses",
    "key": "keys",
    "lamp": "lamps",
    "lawyer": "lawyers",
    "painting": "paintings",
    "picture": "pictures",
    "pilot": "pilots",
    "player": "players",
    "student": "students",
    "table": "tables",
    "teacher": "teachers",
    "tree": "trees",
    "window": "windows",
    "writer": "writers",
}
# between the entries of a list: nothing in them is a value or a key
FILLER_SENTENCES = """
    It rained for most of the day.
    The streets were quiet in the morning.
    Everyone agreed that the plan was good.
    Later that week the weather turned cold.
    There was not much left to do.
    The meeting took longer than expected.
    Nothing else happened until the evening.
    We talked about it for a while.
    The train was late again.
    Some people were already waiting outside.
    In the end it did not matter.
    The music could be heard from far away.
    They had never seen anything like it.
    It was almost time for dinner.
    The news spread quickly through the town.
    He wrote a long letter about it.
    She read the whole report twice.
    Most of the work was done by noon.
    The lights went out for an hour.
    It was hard to say how it had started.
""".strip().split("\n")
