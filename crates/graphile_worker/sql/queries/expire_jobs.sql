-- Sets when the jobs $1 expire: at the times $2.
select :"schema"._rs_expire_jobs($1, $2) as number;
