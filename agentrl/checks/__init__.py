"""What can be found out of an environment and a model before a GPU hour is spent; `agentrl check` prints it."""
