"""Multi-token-prediction heads: announced, present, complete, of the declared type?"""

from assay.checkpoint.mtp.examine import MtpReport, examine

__all__ = ["MtpReport", "examine"]
