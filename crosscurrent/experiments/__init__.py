"""What is run to learn something: recipes built from the models and the tasks."""
