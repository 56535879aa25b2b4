"""What is made of captured attention: explanations, generations, importance, evaluations."""
