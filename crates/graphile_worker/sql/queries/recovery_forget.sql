-- Frees the queues of the dead workers $1, and forgets them.
select from :"schema"._rs_forget_workers($1::text[]);
