"""Why a stored block is refused."""

from __future__ import annotations

from assay.errors import AssayError


class BlockRefused(AssayError):
    """A stored block that is not read; the base of the reasons why."""

    reason = "kv.block_refused"

    def __init__(self, message: str, remedy: str = "delete it: it is computed again") -> None:
        super().__init__(message, finding_id=self.reason, remedy=remedy)


class BlockDamaged(BlockRefused):
    """Its bytes are not those that were written."""

    reason = "kv.block_damaged"


class BlockOfOtherVersion(BlockRefused):
    """Its format is of another assay."""

    reason = "kv.block_version"


class BlockOfOtherTables(BlockRefused):
    """It was coded for another model, by another codec, or with another calibration."""

    reason = "kv.block_other_tables"


class BlockOfOtherTokens(BlockRefused):
    """It is a good block, but not the one that was asked for."""

    reason = "kv.block_other_tokens"
