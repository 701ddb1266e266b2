"""What this process has in memory, by counts that no other process changes.

PSS and USS depend on which other processes have mapped the same libraries: only the program's own reports are in PSS.
"""


def kib(source: str = "status") -> dict[str, int]:
    """The sizes that a file of /proc/self gives, by name: RssAnon of `status`, Anonymous of `smaps_rollup`, ..."""
    with open(f"/proc/self/{source}") as lines:
        return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.rstrip().endswith("kB")}


def anonymous_and_files() -> tuple[int, int]:
    """Bytes of anonymous pages, to the page, and of those that this process has of files."""
    sizes = kib("smaps_rollup")
    return sizes["Anonymous"] << 10, sizes["Rss"] - sizes["Anonymous"] << 10
