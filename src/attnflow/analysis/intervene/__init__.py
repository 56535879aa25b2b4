"""Interventions: predictions and attention before and after a change inside the model."""
