-- Waits for those who are adding or changing jobs, and holds others off until this transaction ends.
lock table :"schema"._private_jobs in share mode;
