-- Deletes jobs that have failed for good and that nobody runs.
delete from :"schema"._private_jobs where attempts = max_attempts and locked_at is null;
