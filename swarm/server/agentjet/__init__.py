"""AgentJet's swarm protocol on top of our service, so that its clients work unchanged. Knows nothing about training or storage."""
