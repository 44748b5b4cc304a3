//! No object in a schema on the session's search_path can redirect our SQL: not the functions of the SQL API, whatever the
//! path is, and no statement as long as PostgreSQL searches `pg_catalog` first (as it does unless a path lists it later).
//!
//! `hostile.sql` plants an overload of every function and operator that our SQL uses.

use crate::old_layouts::{BY_ID, BY_NAME};
use crate::support::{Db, Started, rows, sql_files, until};
use graphile_worker::{
    CleanupTask, JobFilter, JobKeyMode, JobSpec, JobState, RawJobSpec, RescheduleJobOptions, RoleRight,
    SweepStaleWorkersOptions, TaskError, TaskOptions, WorkerContext, WorkerOptions, WorkerUtils,
};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// The operators that SQL uses without naming them: `in`, `between`, `like` and so on.
const IMPLIED: [&str; 9] = ["=", "<>", "<", "<=", ">=", "~~", "!~~", "~~*", "!~~*"];

/// Operators, and names before a parenthesis, with what stands before the name if it is qualified.
#[derive(Default)]
struct Used {
    operators: BTreeSet<String>,
    functions: BTreeSet<(Option<String>, String)>,
}

impl Used {
    fn add(&mut self, sql: &str) {
        let mut rest = sql;
        let mut before: Vec<&str> = Vec::new();
        while let Some(first) = rest.chars().next() {
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            let is_operator = |c: char| "+-*/<>=~!@#%^&|?".contains(c);
            let length = if rest.starts_with("--") {
                rest.find('\n').unwrap_or(rest.len())
            } else if first == '\'' || first == '"' {
                rest[1..].find(first).unwrap() + 2
            } else if is_name(first) {
                rest.find(|c| !is_name(c)).unwrap_or(rest.len())
            } else if is_operator(first) {
                rest.find(|c| !is_operator(c)).unwrap_or(rest.len())
            } else {
                first.len_utf8()
            };
            let (token, after) = rest.split_at(length);
            rest = after;
            if token.starts_with("--") || first.is_whitespace() {
                continue;
            }
            if is_operator(first) && token != "=>" {
                self.operators.insert(token.to_owned());
            }
            if token == "("
                && let [.., qualifier, dot, name] = before[..]
                && name.starts_with(is_name)
            {
                let qualifier = (dot == ".").then(|| qualifier.to_owned());
                self.functions.insert((qualifier, name.to_lowercase()));
            }
            before.push(token);
        }
    }
}

/// What our SQL uses: all of it, also the bodies of functions.
fn used() -> Used {
    let mut used = Used::default();
    for (_, text) in sql_files() {
        used.add(&text);
    }
    used
}

/// A database with hostile objects in `public`, in which nothing is installed yet.
async fn hostile() -> Db {
    hostile_with("false").await
}

/// The same, with or without copies of PostgreSQL's own.
async fn hostile_with(copies: &str) -> Db {
    let used = used();
    let mut operators = used.operators;
    operators.extend(IMPLIED.map(str::to_owned));
    let list = |names: &mut dyn Iterator<Item = &String>| {
        let names: Vec<String> = names.map(|name| format!("'{name}'")).collect();
        format!("array[{}]::text[]", names.join(", "))
    };
    let functions: BTreeSet<String> = used.functions.into_iter().map(|(_, name)| name).collect();
    let plant = include_str!("hostile.sql")
        .replace("$copies", copies)
        .replace("$functions", &list(&mut functions.iter()))
        .replace("$operators", &list(&mut operators.iter().filter(|name| *name != "=>")));
    let mut hasher = std::hash::DefaultHasher::new();
    plant.hash(&mut hasher);
    let plant = &plant;
    Db::from_template(&format!("hostile {:x}", hasher.finish()), async |options| {
        let mut connection = PgConnection::connect_with(&options).await?;
        sqlx::raw_sql(AssertSqlSafe(plant.clone())).execute(&mut connection).await?;
        Ok(())
    })
    .await
}

/// The objects of others that ours depend on, as PostgreSQL records it.
const DEPENDENCIES: &str = "
    with hostile as (
      select classid, objid from pg_depend
      where refclassid = 'pg_namespace'::regclass and refobjid = 'public'::regnamespace
    )
    select coalesce(json_agg(distinct
      pg_describe_object(d.classid, d.objid, d.objsubid) || ' uses ' || pg_describe_object(d.refclassid, d.refobjid, 0)
    ), '[]')
    from pg_depend d
    where (d.refclassid, d.refobjid) in (select classid, objid from hostile)
      and (d.classid, d.objid) not in (select classid, objid from hostile)
      and pg_describe_object(d.classid, d.objid, 0) !~ 'public\\.|_check$'";

/// PostgreSQL parses a function whose body is `begin atomic` when it is created, and records what it refers to: a list of all
/// functions, operators and types that a statement uses, whether it gets to them or not. Since PostgreSQL 14.
const FIRST_WITH_ATOMIC_BODIES: i64 = 140_000;

async fn has_atomic_bodies(safe: &mut PgConnection) -> bool {
    value(safe, "select current_setting('server_version_num')::int").await.as_i64().unwrap() >= FIRST_WITH_ATOMIC_BODIES
}

/// A connection that is safe from what is planted, for the questions of a test.
async fn safe(db: &Db) -> PgConnection {
    PgConnection::connect_with(&db.options().options([("search_path", "pg_catalog")])).await.unwrap()
}

async fn value(connection: &mut PgConnection, sql: &str) -> Value {
    let row = rows(connection, sql).await.unwrap_or_else(|error| panic!("{error}\n{sql}")).remove(0);
    row.as_object().unwrap().values().next().unwrap().clone()
}

async fn assert_no_intrusion(db: &Db, what: &str) {
    let mut safe = safe(db).await;
    let intruded = value(&mut safe, "select is_called from trap.intrusions").await;
    assert_eq!(intruded, false, "{what}");
}

#[tokio::test]
async fn calls_of_functions_that_take_any_type_are_qualified() {
    // An overload with the very types of the arguments is a better match than a function that takes any type; and there is
    // no end of types. (`unnest` of several arrays is PostgreSQL's own by its grammar; of one, hostile.sql covers it.)
    let db = Db::empty().await;
    let takes_any = db
        .value(
            "select json_agg(distinct proname) from pg_proc
             where pronamespace = 'pg_catalog'::regnamespace and proname not in ('unnest', 'min', 'max', 'count', 'lower')
               and (provariadic <> 0 or exists (
                 select from unnest(proargtypes) as type where type::regtype::text ~ '^\"?any|^record$'
               ))",
        )
        .await;
    let takes_any: Vec<String> = serde_json::from_value(takes_any).unwrap();
    let mut problems = Vec::new();
    for (file, text) in sql_files().iter().filter(|(file, _)| !file.starts_with(char::is_numeric)) {
        let mut used = Used::default();
        used.add(text);
        let unqualified =
            used.functions.iter().filter(|(qualifier, name)| qualifier.is_none() && takes_any.contains(name));
        problems.extend(unqualified.map(|(_, name)| format!("{file}: {name}")));
    }
    assert_eq!(problems, [""; 0], "write pg_catalog.NAME(…)");
}

#[tokio::test]
async fn no_statement_refers_to_objects_that_others_have_planted() {
    let db = hostile().await;
    let mut safe = safe(&db).await;
    graphile_worker::migrate(&mut safe, "graphile_worker").await.unwrap();
    let has_atomic_bodies = has_atomic_bodies(&mut safe).await;
    let mut session = db.connect().await;
    sqlx::raw_sql(
        "create table graphile_worker._old_jobs (locked_at timestamptz, locked_by text);
         create table graphile_worker._old_job_queues (locked_at timestamptz, locked_by text);
         create table graphile_worker._private_workers (id text, last_heartbeat_at timestamptz);
         create table graphile_worker._private_job_retirements (id bigint)",
    )
    .execute(&mut safe)
    .await
    .unwrap();
    let mut problems = Vec::new();
    for (file, text) in sql_files().iter().filter(|(file, _)| !file.starts_with(char::is_numeric)) {
        let text = text.replace(":\"schema\"", "graphile_worker").replace(":'schema'", "'graphile_worker'");
        if ["lock_ledger.sql", "uninstall.sql"].contains(&file.as_str()) {
            continue; // Nothing in them is looked up by the path.
        }
        let prepared = sqlx::raw_sql(AssertSqlSafe(format!("prepare probe as {text}"))).execute(&mut session).await;
        if let Err(error) = prepared {
            problems.push(format!("{file}: {error}"));
            continue;
        }
        let parameters: String = sqlx::query_scalar(
            "select pg_catalog.array_to_string(parameter_types, ', ') from pg_catalog.pg_prepared_statements
             where name operator(pg_catalog.=) 'probe'",
        )
        .fetch_one(&mut session)
        .await
        .unwrap();
        if has_atomic_bodies {
            let name = file.trim_end_matches(".sql");
            let probe = format!(
                "create function graphile_worker.probe_{name}({parameters}) returns void language sql begin atomic {text} end"
            );
            if let Err(error) = sqlx::raw_sql(AssertSqlSafe(probe)).execute(&mut session).await {
                problems.push(format!("{file}: {error}"));
            }
        }
        sqlx::raw_sql("deallocate probe").execute(&mut session).await.unwrap();
    }
    let used: Vec<String> = serde_json::from_value(value(&mut safe, DEPENDENCIES).await).unwrap();
    problems.extend(used);
    assert_eq!(problems, [""; 0]);
    assert_no_intrusion(&db, "preparing them calls nothing, either").await;
}

#[tokio::test]
async fn no_function_depends_on_the_path_of_its_caller() {
    let db = hostile().await;
    let mut safe = safe(&db).await;
    graphile_worker::migrate(&mut safe, "graphile_worker").await.unwrap();
    let unpinned = "from pg_proc join pg_language on pg_language.oid = prolang
        where pronamespace = 'graphile_worker'::regnamespace
          and not coalesce(proconfig::text ~ 'search_path=pg_catalog, *\\\\?\"*graphile_worker', false)";
    // Only functions that set the path call them.
    let helpers = value(
        &mut safe,
        &format!("select coalesce(json_agg(proname order by proname), '[]') {unpinned} and lanname <> 'sql'"),
    )
    .await;
    let expected = [
        "_rs_apply_limit",
        "_rs_dissolve_lane",
        "_rs_drain_old_queue",
        "_rs_give_up",
        "_rs_job_queue_id",
        "_rs_job_queue_ids",
        "_rs_lane",
        "_rs_lane_of_queue",
        "_rs_lane_of_task",
        "_rs_put_keyed_job",
        "_rs_put_keyed_jobs",
        "_rs_task_id",
        "_rs_task_ids",
    ];
    assert_eq!(helpers, json!(expected));
    if !has_atomic_bodies(&mut safe).await {
        return;
    }
    // Those in SQL are inlined into the statement that calls them, under its path.
    let mut session = db.connect().await;
    sqlx::raw_sql("select pg_catalog.set_config('search_path', 'public, graphile_worker', false)")
        .execute(&mut session)
        .await
        .unwrap();
    let inlined = rows(&mut safe, &format!(
        "select proname as name, pg_get_function_arguments(pg_proc.oid) as arguments, pg_get_function_result(pg_proc.oid) as result, prosrc as body
         {unpinned} and lanname = 'sql'"
    )).await.unwrap();
    assert!(inlined.len() >= 5, "{inlined:?}");
    for function in inlined {
        let part = |name: &str| function[name].as_str().unwrap().to_owned();
        let probe = format!(
            "create function graphile_worker.probe_{}({}) returns {} language sql begin atomic {}; end",
            part("name"),
            part("arguments"),
            part("result"),
            part("body")
        );
        sqlx::raw_sql(AssertSqlSafe(probe.clone()))
            .execute(&mut session)
            .await
            .unwrap_or_else(|error| panic!("{error}\n{probe}"));
    }
    assert_eq!(value(&mut safe, DEPENDENCIES).await, json!([]));
}

#[tokio::test]
async fn what_is_installed_refers_to_nothing_that_others_have_planted() {
    let db = hostile().await;
    graphile_worker::migrate(&db.pool, "graphile_worker").await.unwrap();
    let mut safe = safe(&db).await;
    assert_eq!(value(&mut safe, DEPENDENCIES).await, json!([]));
    assert_no_intrusion(&db, "installing").await;
}

/// The hostile objects, as seen by a session: in `public`, where everybody could create objects before PostgreSQL 15, or in a
/// schema of the application.
async fn hostile_pool(db: &Db, path: &str) -> PgPool {
    let schema = path.split(',').next().unwrap();
    if schema != "public" {
        let rename = format!("alter schema public rename to {schema}; create schema public");
        sqlx::raw_sql(AssertSqlSafe(rename)).execute(&mut safe(db).await).await.unwrap();
    }
    let options = db.options().options([("search_path", format!("{path}, public"))]);
    PgPoolOptions::new().max_connections(10).connect_with(options).await.unwrap()
}

/// The name of the database, which no other test has.
fn name_of(db: &Db) -> &str {
    db.url().rsplit('/').next().unwrap()
}

/// Every statement that a worker and its utilities make.
async fn run_everything(db: &Db, pool: PgPool, prepared: bool) {
    let utils = WorkerUtils::new(pool.clone(), "graphile_worker");
    let mut safe = safe(db).await;
    utils.migrate().await.unwrap();
    assert!(utils.is_migrated().await.unwrap());

    // Jobs of every kind, by every way.
    let spec = JobSpec::builder;
    utils
        .add_raw_job("fails", json!({"a": 1}), spec().queue_name("q").flags(vec!["f".to_owned()]).build())
        .await
        .unwrap();
    utils.add_raw_job("fails", json!([1]), spec().max_attempts(1).build()).await.unwrap();
    for mode in [JobKeyMode::Replace, JobKeyMode::PreserveRunAt, JobKeyMode::UnsafeDedupe, JobKeyMode::Replace] {
        utils.add_raw_job("works", json!([1]), spec().job_key("k").job_key_mode(mode).build()).await.unwrap();
    }
    utils.add_raw_job("completes", json!(null), JobSpec::default()).await.unwrap();
    utils.add_raw_job("forbidden", json!(null), spec().flags(vec!["forbidden".to_owned()]).build()).await.unwrap();
    let later = spec().run_at(chrono::Utc::now() + Duration::from_secs(3600)).job_key("later").build();
    utils.add_raw_job("works", json!(null), later).await.unwrap();
    let task = |count: usize| if count > 100 { "works".to_owned() } else { "limited".to_owned() };
    let many = |count: usize, key: bool| -> Vec<RawJobSpec<Value>> {
        let spec = |n: usize| {
            let spec = JobSpec::builder().queue_name(format!("q{}", n % 7)).priority((n % 3) as i16);
            let spec = spec.flags(vec!["f".to_owned()]);
            if key { spec.job_key(format!("many {n}")).build() } else { spec.build() }
        };
        (0..count).map(|n| RawJobSpec { identifier: task(count), payload: json!(n), spec: spec(n) }).collect()
    };
    for jobs in [many(5, true), many(5, false), many(200, false)] {
        assert_eq!(utils.add_raw_jobs(&jobs).await.unwrap().len(), jobs.len());
    }
    let merged = (0..20).map(|n| {
        let utils = utils.clone();
        let spec = JobSpec::builder().flags(vec!["f".to_owned()]).build();
        tokio::spawn(async move { utils.add_raw_job("limited", json!(n), spec).await })
    });
    for added in merged.collect::<Vec<_>>() {
        added.await.unwrap().unwrap();
    }
    let mut transaction = pool.begin().await.unwrap();
    let within = utils.within(&mut transaction);
    within.add_raw_job("works", json!(null), JobSpec::default()).await.unwrap();
    within.add_raw_jobs(&many(200, false)).await.unwrap();
    transaction.commit().await.unwrap();

    // A worker that has died with a job, another whose locks are stale.
    sqlx::raw_sql(
        "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-dead', now() - interval '1 day');
         select graphile_worker.add_job('works', queue_name := 'dead', flags := '{infrastructure_resilient}');
         select graphile_worker.add_job('works', queue_name := 'stale');
         update graphile_worker._private_jobs set locked_at = now() - interval '2 hours', locked_by = 'rs-live-dead', attempts = 1
         where flags ? 'infrastructure_resilient';
         update graphile_worker._private_job_queues set locked_at = now() - interval '1 day', locked_by = 'stale' where queue_name = 'stale'",
    )
    .execute(&mut safe)
    .await
    .unwrap();

    let options = WorkerOptions::default().pg_pool(pool.clone()).listen_os_shutdown_signals(false).concurrency(4);
    let options = options.use_prepared_statements(prepared).forbidden_flags(["forbidden"]);
    let options = options.job_flag_allowlist(["f", "forbidden", "infrastructure_resilient"]);
    let options = options.heartbeat_interval(Duration::from_millis(200)).sweep_interval(Duration::from_millis(200));
    let options = options.recovery_delay(Duration::ZERO).keep_locks_fresh_after(Duration::from_millis(20));
    let options = options.with_cron("* * * * * works ?id=tick&fill=2m&queue=cron {\"cron\": true}").unwrap();
    let options = options.define_task("works", |_: Value, _| async {});
    let options = options.define_task("limited", |_: Value, _| async {});
    let options = options.task_options("limited", TaskOptions::default().max_concurrent(2));
    // Later than this test: it must not run again while the jobs are listed.
    let fails = || TaskError::retry_after(Duration::from_secs(3600), "it fails");
    let options = options.define_task("fails", move |_: Value, _| async move { Err::<(), _>(fails()) });
    let options = options.define_task("completes", |_: Value, ctx: WorkerContext| async move {
        ctx.add_raw_job("limited", json!(null), JobSpec::default()).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        ctx.complete_in(ctx.pg_pool().begin().await?).await?;
        Ok::<(), TaskError>(())
    });
    sqlx::raw_sql("insert into graphile_worker._private_known_crontabs values ('tick', now() - interval '1 day', now() - interval '1 day')")
        .execute(&mut safe)
        .await
        .unwrap();
    let started = Started::new(options).await;
    let done = "select coalesce(bool_and(attempts > 0 or run_at > now() or task_identifier = 'forbidden'), true)
          and count(*) filter (where task_identifier = 'fails' and attempts > 0 and locked_at is null) = 2
          and (select last_execution > now() - interval '1 hour' from graphile_worker._private_known_crontabs)
        from graphile_worker.jobs";
    until("all jobs have run", async || {
        assert!(!started.running.is_finished(), "the worker ended");
        (value(&mut safe, done).await == true).then_some(())
    })
    .await;
    assert!(!utils.list_workers(Duration::from_secs(1)).await.unwrap().is_empty());
    assert!(!utils.list_active_workers(Duration::from_secs(1)).await.unwrap().is_empty());
    started.stop().await;
    utils
        .add_raw_job("limited", json!(null), JobSpec::builder().flags(vec!["accepted".to_owned()]).build())
        .await
        .unwrap();
    let options = WorkerOptions::default().pg_pool(pool.clone()).listen_os_shutdown_signals(false);
    let options = options.use_prepared_statements(prepared).accepted_flags(["accepted"]);
    options.define_task("limited", |_: Value, _| async {}).init().await.unwrap().run_once().await.unwrap();

    // Operators.
    let filter = JobFilter::default()
        .states([JobState::Retrying, JobState::Failed])
        .search("FAILS".to_owned())
        .newest_first(true)
        .after(1_000_000);
    let failed = utils.list_jobs(&filter).await.unwrap();
    assert_eq!(failed.len(), 2);
    let id = failed[0].id;
    let named = JobFilter::default().task_identifier("works".to_owned()).key("later".to_owned());
    assert_eq!(utils.list_jobs(&named).await.unwrap().len(), 1);
    let queued = JobFilter::default().queue_name("q".to_owned());
    assert_eq!(utils.list_jobs(&queued).await.unwrap().len(), 1);
    utils.find_job(id).await.unwrap().unwrap();
    utils.why(id).await.unwrap();
    utils.stats().await.unwrap();
    utils.job_counters().await.unwrap();
    utils.list_queues(10).await.unwrap();
    utils.doctor().await.unwrap();
    assert_eq!(utils.cron_executions(&["tick".to_owned()]).await.unwrap().len(), 1);
    let role = format!("hostile_{}", name_of(db));
    sqlx::raw_sql(AssertSqlSafe(format!("create role {role}"))).execute(&mut safe).await.unwrap();
    utils.grant(&role, &[RoleRight::Add, RoleRight::Run, RoleRight::Read]).await.unwrap();
    utils.revoke(&role).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("drop role {role}"))).execute(&mut safe).await.unwrap();
    utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    utils.reschedule_jobs(&[id], RescheduleJobOptions::default().priority(1)).await.unwrap();
    utils.permanently_fail_jobs(&[id], "enough").await.unwrap();
    utils.complete_jobs(&[id]).await.unwrap();
    utils.remove_job("later").await.unwrap().unwrap();
    utils.force_unlock_workers(&["nobody"]).await.unwrap();
    use CleanupTask::{DeletePermanentlyFailedJobs, GcJobQueues, GcTaskIdentifiers};
    utils.cleanup(&[DeletePermanentlyFailedJobs, GcTaskIdentifiers, GcJobQueues]).await.unwrap();
    assert!(utils.uninstall_preview().await.unwrap().installed);
    assert!(utils.uninstall().await.unwrap().dropped);
}

#[tokio::test]
async fn nothing_in_public_is_called_by_anything_that_we_run() {
    let db = hostile().await;
    let pool = hostile_pool(&db, "public").await;
    run_everything(&db, pool, true).await;
    assert_no_intrusion(&db, "what a worker and its utilities run").await;
}

#[tokio::test]
async fn nothing_in_a_schema_of_the_application_is_called_through_a_pooler_that_drops_settings() {
    let db = hostile().await;
    let pool = hostile_pool(&db, "app").await;
    run_everything(&db, pool, false).await;
    assert_no_intrusion(&db, "what a worker and its utilities run").await;
}

/// A path that lists `pg_catalog` behind a schema in which others may create objects.
#[tokio::test]
async fn nothing_is_called_if_the_path_of_the_application_lists_pg_catalog_late() {
    let db = hostile_with("true").await;
    let pool = hostile_pool(&db, "app, pg_catalog").await;
    run_everything(&db, pool, true).await;
    assert_no_intrusion(&db, "what a worker and its utilities run").await;
}

#[tokio::test]
async fn nothing_is_called_when_an_old_layout_is_moved() {
    for layout in [BY_NAME, BY_ID] {
        let db = hostile().await;
        sqlx::raw_sql(AssertSqlSafe(layout)).execute(&mut safe(&db).await).await.unwrap();
        let pool = hostile_pool(&db, "public").await;
        assert_eq!(graphile_worker::migrate(&pool, "graphile_worker").await.unwrap().moved_jobs, 3);
        assert_no_intrusion(&db, "the move").await;
    }
}

/// The role may create functions in `public`, as every role could before PostgreSQL 15, and nothing else.
#[tokio::test]
async fn a_role_cannot_become_superuser_with_a_function_named_like_postgresqls() {
    let db = Db::installed().await;
    let role = format!("mallory_{}", db.value("select current_database()").await.as_str().unwrap());
    db.run(&format!("create role {role} login; grant create on schema public to public")).await;
    let attack = format!(
        "create function public.exp(integer) returns double precision language plpgsql as $$
           begin alter role {role} superuser; return 1; end $$;
         create function public.rest(numeric, integer) returns numeric language plpgsql as $$
           begin alter role {role} superuser; return 0; end $$;
         create operator public.% (leftarg = numeric, rightarg = integer, function = public.rest);
         create function public.times(double precision, integer) returns double precision language plpgsql as $$
           begin alter role {role} superuser; return 0; end $$;
         create operator public.* (leftarg = double precision, rightarg = integer, function = public.times)"
    );
    sqlx::raw_sql(AssertSqlSafe(attack)).execute(&mut db.connect_as(&role).await).await.unwrap();
    for prepared in [true, false] {
        db.add_job("'fails'").await;
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        let options = options.use_prepared_statements(prepared);
        let worker =
            options.define_task("fails", |_: Value, _| async { Err::<(), _>("it fails") }).init().await.unwrap();
        worker.run_once().await.unwrap();
        assert_eq!(db.value("select bool_and(attempts = 1) from graphile_worker.jobs").await, true);
    }
    let is_superuser = db.value(&format!("select rolsuper from pg_roles where rolname = '{role}'")).await;
    db.run(&format!("drop owned by {role}; drop role {role}")).await;
    assert_eq!(is_superuser, false);
}

#[tokio::test]
async fn functions_find_their_own_objects_whatever_the_caller_has_in_the_way() {
    let db = Db::installed().await;
    db.run(
        "create schema trap;
         create table trap._private_jobs (like graphile_worker._private_jobs including all);
         create table trap._private_tasks (like graphile_worker._private_tasks including all);
         create table trap._private_job_queues (like graphile_worker._private_job_queues including all);
         create function trap.now() returns timestamptz language sql as $$ select timestamptz '1999-01-01Z' $$;
         create function trap.pg_notify(text, text) returns void language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap.length(text) returns int language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap._rs_task_id(text) returns int language plpgsql as $$ begin raise 'trapped'; end $$;
         create function trap.equal(text, text) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$;
         create operator trap.= (leftarg = text, rightarg = text, function = trap.equal);
         create type trap.job_spec as (identifier text);
         select graphile_worker.add_job('t', queue_name := 'q', job_key := 'k') from generate_series(1, 3)",
    )
    .await;
    let mut caller = db.connect().await;
    sqlx::raw_sql("create temp table _private_jobs (id int); set search_path = trap, pg_temp, pg_catalog")
        .execute(&mut caller)
        .await
        .unwrap();
    for call in [
        "add_job('t', '{}', 'q', null, 3, null, 1, array['f'])",
        "add_job('new', '{}', 'new', null, 3, 'k')",
        "add_job('t', job_key := 'd', job_key_mode := 'unsafe_dedupe')",
        "add_jobs(array[('t', null, 'q', null, null, null, null, null)]::graphile_worker.job_spec[])",
        "add_jobs(array[('t', null, 'q', null, null, 'k', null, null)]::graphile_worker.job_spec[])",
        "reschedule_jobs(array[1], run_at := null, priority := 4)",
        "permanently_fail_jobs(array[1])",
        "force_unlock_workers(array['w'])",
        "remove_job('d')",
        "complete_jobs(array[1])",
    ] {
        rows(&mut caller, &format!("select 1 as one from graphile_worker.{call}"))
            .await
            .unwrap_or_else(|error| panic!("{call}: {error}"));
    }
    let left = db
        .value("select json_agg(json_build_array(task_identifier, priority) order by id) from graphile_worker.jobs")
        .await;
    assert_eq!(left, json!([["t", 1], ["t", 0]]), "the keyed ones were removed and completed");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where run_at < '2000-01-01Z'").await, 0);
    assert_eq!(db.value("select count(*) from trap._private_jobs").await, 0);
}
