"""The parts of a decoder layer, in the order in which a token meets them."""
