"""The records: SQL is the truth, MLflow a copy of it. Only this room imports sqlalchemy, alembic and mlflow."""
