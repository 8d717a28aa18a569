"""Real processes, a real broker, a real adapter store on disk, a tiny model that really learns."""
