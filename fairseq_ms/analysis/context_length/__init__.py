"""How many tokens a streaming model looks back (Transformer-QL, Appendix B)."""
