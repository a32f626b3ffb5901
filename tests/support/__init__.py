"""What several test files share: the state machine of the engine, its runs in little memory, strategies."""
