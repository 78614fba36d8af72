"""AgentJet's swarm protocol over the same service: its clients plug in unchanged. Knows nothing of training or storage."""
