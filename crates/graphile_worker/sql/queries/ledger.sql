-- Node's ledger. Read through jsonb because ledgers made before level 16 have no `breaking`.
select id, coalesce((to_jsonb(migrations) ->> 'breaking')::boolean, false) as breaking
from :"schema".migrations
order by id;
