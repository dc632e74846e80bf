"""Fingerprints of what a run was trained on, so that leakage can be checked later.

A package carries hashes of every datum, never the text. Three kinds, each the first 16 hex
characters of a SHA-256:

    exact       the decoded text, special tokens stripped, as it is
    normalised  the same, lower-cased, punctuation removed, white space collapsed
    ngrams8     each run of eight words of the normalised text

`evals` hashes its items by these same functions. A run that starts from a package inherits
the package's fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from registry.errors import Corrupt

FORMAT = 1
NGRAM = 8
_HEX = 16


def normalise(text: str) -> str:
    """Lower-case, drop punctuation, collapse white space.

    Signs that carry meaning in arithmetic (+ < = >) are symbols, not punctuation, and stay;
    a minus sign is punctuation to Unicode, and is kept too.
    """
    kept = (
        char if char == "-" or not unicodedata.category(char).startswith("P") else " "
        for char in unicodedata.normalize("NFKC", text).lower()
    )
    return " ".join("".join(kept).split())


def digest(text: str) -> str:
    """The first 16 hex characters of the SHA-256 of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HEX]


def exact_hash(text: str) -> str:
    """Hash of a decoded text as it is."""
    return digest(text)


def normalised_hash(text: str) -> str:
    """Hash of a decoded text's normalised form."""
    return digest(normalise(text))


def ngram_hashes(text: str) -> list[str]:
    """Hashes of each run of eight words of the normalised text; empty for shorter texts."""
    words = normalise(text).split()
    return [digest(" ".join(words[i : i + NGRAM])) for i in range(len(words) - NGRAM + 1)]


@dataclass(kw_only=True)
class TrainingData:
    """The fingerprints seen so far. Grows as a run trains; order does not matter."""

    exact: set[str] = field(default_factory=set)
    normalised: set[str] = field(default_factory=set)
    ngrams8: set[str] = field(default_factory=set)

    def add(self, texts: Iterable[str]) -> None:
        """Take in the decoded text of each datum."""
        for text in texts:
            exact = exact_hash(text)
            if exact in self.exact:
                continue
            self.exact.add(exact)
            self.normalised.add(normalised_hash(text))
            self.ngrams8.update(ngram_hashes(text))

    def merge(self, other: TrainingData) -> None:
        """Take in all that another has seen."""
        self.exact |= other.exact
        self.normalised |= other.normalised
        self.ngrams8 |= other.ngrams8

    def saw(self, text: str) -> bool:
        """Whether this text was trained on, word for word or but for case and punctuation."""
        return exact_hash(text) in self.exact or normalised_hash(text) in self.normalised

    def saw_every_ngram(self, text: str) -> bool:
        """Whether the text has eight words or more and each run of eight was trained on."""
        hashes = ngram_hashes(text)
        return bool(hashes) and all(item in self.ngrams8 for item in hashes)

    def dump(self) -> bytes:
        """The bytes of training-data.json; equal sets give equal bytes."""
        return json.dumps(
            {
                "format": FORMAT,
                "exact": sorted(self.exact),
                "normalised": sorted(self.normalised),
                "ngrams8": sorted(self.ngrams8),
            },
            separators=(",", ":"),
        ).encode()


def load(data: bytes) -> TrainingData:
    """Read training-data.json. Raises Corrupt when it is not one."""
    try:
        raw = json.loads(data)
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r} is not {FORMAT}")
        kinds = {name: raw[name] for name in ("exact", "normalised", "ngrams8")}
        for name, hashes in kinds.items():
            if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
                raise TypeError(f"{name} is not a list of hashes")
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"training-data.json cannot be read: {error}") from None
    return TrainingData(**{name: set(hashes) for name, hashes in kinds.items()})
