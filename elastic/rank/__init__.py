"""What runs inside a rank process: model, buffers, step graphs, EP communication, weights, agent. The only part with torch."""
