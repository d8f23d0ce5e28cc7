"""JSON schemas for grammars: 200 in the forms of public APIs, and those of Debian's json-schema-test-suite.

    parts      hand-written parts: fields of 25 objects
    forms      the forms that APIs use, each for every object
    debian     a reader of the suite
    serving    serves each schema once, and checks the texts, for `specq bench grammars`
    step_cost, mask_times, forced  what masks cost and forced tokens bring
    mask_digests  all masks as digests, to compare versions of llguidance

Rule: a text that follows one of the 200 ends within 256 tokens, so strings, numbers and arrays have bounds. To add
schemas, add an object to `OBJECTS` or a function to `FORMS`.
"""

from bench.grammars.debian import SuiteSchema, suite_schemas
from bench.grammars.forms import FORMS, api_schemas

__all__ = ["FORMS", "SuiteSchema", "api_schemas", "suite_schemas"]
