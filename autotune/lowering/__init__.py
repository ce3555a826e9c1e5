"""From a plan to the graph that is simulated: what the runtime sends, chunk by chunk, on which links and threads."""
