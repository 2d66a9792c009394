"""Version of the conformance suite: minor releases may add required checks, patches only mend them."""

__version__ = "0.1.0"
