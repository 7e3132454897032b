"""What is run to learn something: recipes, studies, runs and reports."""
