-- The ids of the tasks named $1.
select identifier, id from :"schema"._private_tasks where identifier = any ($1::text[]);
