"""The records: SQL is the source of truth, MLflow a copy. Only this package imports sqlalchemy, alembic and mlflow."""
