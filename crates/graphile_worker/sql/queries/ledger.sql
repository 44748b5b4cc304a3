-- Node's ledger. Read as jsonb, because ledgers created before level 16 have no column `breaking`.
select id, coalesce((pg_catalog.to_jsonb(migrations) ->> 'breaking'::text)::boolean, false) as breaking
from :"schema".migrations
order by id;
