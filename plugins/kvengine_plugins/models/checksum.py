"""The checksum model by name: runs on the null executor only."""

from __future__ import annotations

from typing import Any

from kvengine.core.errors import ConfigError
from kvengine.core.shapes import KvShape, ModelShape
from kvengine.models.byte_tokenizer import ByteTokenizer
from kvengine.policies import Build, Tokenizer
from kvengine.testing.sources import ChecksumSource


class ChecksumModel:
    """One imaginary layer; its next token is a sum over all slots (kvengine.testing.sources)."""

    name = "checksum"

    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=ByteTokenizer.vocab_size,
            max_position=2**31,
            dtype="fp32",
        )

    def weight_bytes(self) -> int:
        return 0  # too few to count

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()

    def load(self, build: Build) -> Any:
        raise ConfigError("model", self.name, "has no weights; run it with executor=null")

    def token_source(self, kv: KvShape) -> ChecksumSource:
        return ChecksumSource()
