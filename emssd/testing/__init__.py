"""What plugin authors test with: conformance suites, tiny models, oracles, adversarial drafters, state machines."""
