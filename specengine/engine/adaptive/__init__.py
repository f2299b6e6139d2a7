"""How deep to draft, chosen by what rounds cost and what they accept."""
