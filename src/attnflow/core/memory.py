"""Free memory, and errors that mean it ran out."""

from pathlib import Path

MEMORY = ("allocate memory", "not enough memory", "out of memory")  # in messages of torch


def find_available_memory() -> int | None:
    """The bytes that are free on Linux, within the limits of control groups; None elsewhere."""
    known = read_counters(Path("/proc/meminfo"))
    if "MemAvailable:" not in known:
        return None
    return int(max(0, min(known["MemAvailable:"] * 1024, *map(find_left, list_control_groups()))))


def list_control_groups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The folders of this process's control groups, version 1 or 2, and of their parents."""
    folders = [root]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for _, kinds, path in (line.split(":", 2) for line in lines):
        top = root / "memory" if "memory" in kinds.split(",") else root
        own = top / path.strip("/")
        folders += [top, *(folder for folder in (own, *own.parents) if top in folder.parents)]
    return list(dict.fromkeys(folders))


def find_left(group: Path) -> float:
    """The free bytes of a control group, infinite without a limit; caches count as free."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (int((group / name).read_text()) for name in (most, used))
        except (OSError, ValueError):  # another version, or "max"
            continue
        cached = read_counters(group / "memory.stat")
        return limit - usage + cached.get("inactive_file", 0) + cached.get("active_file", 0)
    return float("inf")


def read_counters(path: Path) -> dict[str, int]:
    """The numbers in a file of /proc or /sys by their names; empty if it does not exist."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def is_of_memory(error: Exception) -> bool:
    """Whether memory ran out: numpy raises MemoryError, torch a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in MEMORY)
    )


def format_gigabytes(size: int) -> str:
    """A number of bytes for a message."""
    return f"{size / 1e9:,.1f} GB"
