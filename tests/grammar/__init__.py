"""The tests of grammars: what they allow, masks, and the texts that follow."""
