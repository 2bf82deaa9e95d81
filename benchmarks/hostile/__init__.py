"""`make hostile`: a hundred thousand hostile messages for a real agent, while an honest client asks."""
