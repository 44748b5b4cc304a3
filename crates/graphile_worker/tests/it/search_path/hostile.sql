-- What a role that may create objects in the schema `public` can put in the way of SQL which uses the functions $functions
-- and the operators $operators: overloads for all types that our SQL works with, and a type of its own with implicit casts.
-- With $copies, also exact copies of PostgreSQL's own: a path that lists pg_catalog later finds them first.
-- Each of them counts the call (in a sequence, which no rollback undoes) and fails.
set search_path = pg_catalog;
set check_function_bodies = off;
create schema trap;
create sequence trap.intrusions;
create function trap.intrude(what pg_catalog.text) returns pg_catalog.void language plpgsql
  set search_path = pg_catalog as $$
begin
  perform nextval('trap.intrusions');
  raise exception 'INTRUDED by %', what;
end
$$;

do $plant$
declare
  base text[] := '{int2,int4,int8,float4,float8,numeric,text,varchar,name,"char",bool,json,jsonb,timestamptz,interval,oid,regclass,xid,_int4,_int8,_text,_timestamptz}';
  types regtype[] := base::regtype[] || 'anyarray'::regtype;
  body text := $body$ begin perform trap.intrude(%L); end $body$;
  operator_name text;
  signature record;
  given regtype[];
  argument regtype;
  result text;
begin
  -- A type of its own, and implicit casts to and from it.
  create type public.anything as (value pg_catalog.text);
  foreach argument in array base::regtype[] loop
    execute format(
      'create function public.to_anything(%1$s) returns public.anything language plpgsql as %2$L',
      argument, format(body, 'a cast from ' || argument)
    );
    execute format('create cast (%1$s as public.anything) with function public.to_anything(%1$s) as implicit', argument);
    execute format(
      'create function public.from_anything_%3$s(public.anything) returns %1$s language plpgsql as %2$L',
      argument, format(body, 'a cast to ' || argument), argument::oid
    );
    execute format(
      'create cast (public.anything as %1$s) with function public.from_anything_%2$s(public.anything) as implicit',
      argument, argument::oid
    );
  end loop;

  -- Types whose names are those of PostgreSQL's own: a cast to one would run its check.
  foreach result in array array['text', 'json', 'jsonb', 'timestamptz', 'float8', 'int2', 'int8', 'regclass', 'name'] loop
    execute format(
      'create domain public.%I as pg_catalog.%1$I check (trap.intrude(%2$L) is null)', result, 'the type ' || result
    );
  end loop;

  -- Operators, for every pair of types. Operators of the same types share their functions.
  for signature in
    select l, r from unnest(types || 'public.anything'::regtype) as l, unnest(types || 'public.anything'::regtype) as r
  loop
    given := array[signature.l, signature.r];
    execute format(
      'create function public.compare(%1$s, %2$s) returns bool language plpgsql as %3$L;
       create function public.operate(%1$s, %2$s) returns %4$s language plpgsql as %3$L',
      signature.l, signature.r, format(body, format('an operator of %s', given)),
      case
        when signature.r = 'interval'::regtype then 'interval'
        when signature.l = 'anyarray'::regtype and signature.r <> 'anyarray'::regtype then 'text'
        else signature.l::text
      end
    );
    foreach operator_name in array $operators loop
      continue when not $copies and exists (
        select from pg_operator
        where oprname = operator_name and oprleft = signature.l and oprright = signature.r
          and oprnamespace = 'pg_catalog'::regnamespace
      );
      execute format(
        'create operator public.%s (leftarg = %s, rightarg = %s, function = public.%s)',
        operator_name, signature.l, signature.r, case when operator_name ~ '[<>=~?@&!]' then 'compare' else 'operate' end
      );
    end loop;
  end loop;

  -- Functions: each signature of the same name in pg_catalog, with each argument in turn replaced by each type, and with
  -- what takes any type replaced by each type; and one that has the same arguments and a default more.
  for signature in
    with original as (
      select
        proname as name, array(select unnest(proargtypes)) as arguments, pronargs as n,
        case
          when prorettype::regtype::text ~ 'any|internal|handler|record|trigger' then 'text'
          else prorettype::regtype::text
        end as returns
      from pg_proc
      where proname = any ($functions) and pronamespace = 'pg_catalog'::regnamespace
    ), replaced as (
      select
        name, returns,
        (
          select string_agg(
            case
              when original.position = replace.nth then one
              when type::regtype::text in ('anyarray', 'anycompatiblearray')
                then coalesce((select nullif(typarray, 0)::regtype from pg_type where oid = one), one)
              when type::regtype::text ~ 'any|internal|record' then one
              else type::regtype
            end::text, ', ' order by original.position
          )
          from unnest(original.arguments) with ordinality as original (type, position)
        ) as arguments
      from original, generate_series(0, n) as replace (nth), unnest(types) as one
    )
    select name, coalesce(arguments, '') as arguments, '' as default_value, min(returns) as returns
    from replaced group by 1, 2
    union all
    select name, concat_ws(', ', (select string_agg(type::regtype::text, ', ') from unnest(arguments) as type), 'int'), ' default 0', returns
    from original where not exists (select from unnest(arguments) as type where type::regtype::text ~ 'any|internal|record')
    order by default_value
  loop
    continue when to_regprocedure(format('public.%I(%s)', signature.name, signature.arguments)) is not null;
    execute format(
      'create function public.%I(%s) returns %s language plpgsql as %L', signature.name,
      signature.arguments || signature.default_value, signature.returns,
      format(body, format('the function %s(%s)', signature.name, signature.arguments))
    );
  end loop;
end
$plant$;
grant usage on schema trap to public;
grant usage on sequence trap.intrusions to public;
