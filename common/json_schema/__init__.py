"""JSON schemas as people write them, rewritten into schemas that llguidance keeps to the letter, or refused.

llguidance lacks some keywords (`not`, `if`, `dependentRequired`, ...), and keeps others less exactly than they are
written (bounds of numbers, counts of keys). A schema is rewritten before llguidance sees it:

    the client's schema ──reading──> plain schema ──writing──> llguidance's schema
                                      │      ▲
                                      └ negation, emptiness

`reading` resolves references and drops what constrains nothing. `writing` replaces what llguidance lacks by what it
has. Both are pure. A schema that cannot be rewritten into an equal one is refused, by keyword and JSON pointer.
"""

from common.json_schema.plain import UnkeptError
from common.json_schema.writing import exact

__all__ = ["UnkeptError", "exact"]
