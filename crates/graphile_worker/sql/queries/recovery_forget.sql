-- Unlocks the queues of the dead workers $1, and deletes their registrations.
select from :"schema"._rs_forget_workers($1::text[]);
