"""What several test files share: the state machine of the engine, and its runs in little memory."""
