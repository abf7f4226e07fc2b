"""From the queue to the result: claims jobs, opens them in bounded processes, runs them, and stores how they ended."""
