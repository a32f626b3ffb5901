"""The conformance suites of `emssd_testing`, their rules, and the requests and models that they play."""
