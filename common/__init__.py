"""What every script shares: environments, seeding, the run folder. Nothing of PPO itself lives here."""
