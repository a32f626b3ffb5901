"""The conformance suites of `emssd.testing`, their rules, and the requests and models that they play."""
