//! Installing, taking over, refusing.

use crate::support::{Db, Listener, until};
use crate::worker_support::until_a_session_waits_for_a_lock;
use graphile_worker::{Error, migrate};
use serde_json::{Value, json};
use sqlx::PgConnection;

async fn ledger(db: &Db, schema: &str) -> Value {
    db.value(&format!("select json_object_agg(id, breaking order by id) from \"{schema}\".migrations")).await
}

/// Everything in the schema that a migration could touch, with the row versions of the catalog.
async fn catalog(db: &Db) -> Value {
    db.value(
        "select json_build_array(
           (select json_agg(json_build_array(oid, relname, xmin) order by oid) from pg_class
            where relnamespace = 'graphile_worker'::regnamespace),
           (select json_agg(json_build_array(oid, proname, xmin) order by oid) from pg_proc
            where pronamespace = 'graphile_worker'::regnamespace),
           (select json_agg(json_build_array(id, xmin) order by id) from graphile_worker.migrations),
           (select json_agg(json_build_array(id, xmin) order by id) from graphile_worker._rs_additions))",
    )
    .await
}

#[tokio::test]
async fn an_empty_database_ends_at_nodes_level_with_our_own_steps_apart() {
    let db = Db::empty().await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.level, migration.changed), (None, 20, true));
    assert_eq!(migration.to_string(), "schema \"graphile_worker\" installed at level 20");

    let ledger = ledger(&db, "graphile_worker").await;
    let breaking: Vec<i32> = (1..=20).filter(|id| ledger[id.to_string()] == json!(true)).collect();
    assert_eq!(breaking, [1, 3, 11, 13, 14, 16, 19]);
    assert_eq!(ledger.as_object().unwrap().len(), 20, "Node's ids and no other");
    assert_eq!(
        db.value("select json_agg(id order by id) from graphile_worker._rs_additions").await,
        json!([3, 4, 5, 7, 9, 13, 15, 16, 17, 18, 19, 21, 22])
    );
}

#[tokio::test]
async fn migrating_again_changes_nothing_and_waits_for_no_lock() {
    let db = Db::installed().await;
    let before = catalog(&db).await;
    // Another session may hold any lock that workers and administrators take.
    let mut busy = db.connect().await;
    sqlx::raw_sql(
        "begin; lock table graphile_worker._private_jobs, graphile_worker._private_tasks in access exclusive mode;
         select pg_advisory_xact_lock(hashtextextended('graphile_worker migrate graphile_worker', 0))",
    )
    .execute(&mut busy)
    .await
    .unwrap();
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert!(!migration.changed);
    assert_eq!(migration.to_string(), "schema \"graphile_worker\" is up to date at level 20");
    assert_eq!(catalog(&db).await, before);
}

#[tokio::test]
async fn vacuum_settings_are_set_and_not_changed_again() {
    let db = Db::installed().await;
    let settings = "select json_object_agg(relname, reloptions) from pg_class
        where relname in ('_private_jobs', '_private_job_queues')";
    let ours = json!(["autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off"]);
    let queues = json!(["autovacuum_vacuum_cost_delay=0", "vacuum_truncate=off", "fillfactor=70"]);
    assert_eq!(db.value(settings).await, json!({"_private_jobs": ours, "_private_job_queues": queues}));

    db.run("alter table graphile_worker._private_jobs set (vacuum_truncate = on)").await;
    migrate(&db.pool, "graphile_worker").await.unwrap();
    let theirs = json!(["autovacuum_vacuum_cost_delay=0", "vacuum_truncate=on"]);
    assert_eq!(db.value(settings).await["_private_jobs"], theirs);
}

#[tokio::test]
async fn eight_installers_at_once_all_succeed_and_one_installs() {
    let db = Db::empty().await;
    let installers = (0..8).map(|_| {
        let pool = db.pool.clone();
        tokio::spawn(async move { migrate(&pool, "graphile_worker").await })
    });
    let mut installed = 0;
    for installer in installers.collect::<Vec<_>>() {
        let migration = installer.await.unwrap().unwrap();
        installed += u32::from(migration.changed && migration.from.is_none());
    }
    assert_eq!(installed, 1);
    db.add_job("'t'").await;
}

#[tokio::test]
async fn installing_does_not_depend_on_the_isolation_level_of_the_database() {
    let db = Db::empty().await;
    let installers = (0..4).map(|_| async {
        let mut connection = db.connect().await;
        sqlx::raw_sql("set default_transaction_isolation = 'serializable'").execute(&mut connection).await.unwrap();
        migrate(&mut connection, "graphile_worker").await.unwrap()
    });
    let (a, b, c, d) = {
        let mut installers = installers;
        let mut next = || installers.next().unwrap();
        tokio::join!(next(), next(), next(), next())
    };
    assert_eq!([a, b, c, d].iter().filter(|migration| migration.from.is_none() && migration.changed).count(), 1);
}

#[tokio::test]
async fn any_legal_schema_name_works() {
    for name in [
        "UPPER case",
        "da-sh",
        "quo\"te",
        "apo's",
        "back\\slash",
        "$$",
        "$body$",
        "select",
        "näme☃",
        "$user ",
        "a, b",
        "new\nline",
        ":'schema'",
        &"x".repeat(63),
    ] {
        let db = Db::empty().await;
        migrate(&db.pool, name).await.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert!(!migrate(&db.pool, name).await.unwrap().changed, "{name}");
        let quoted = format!("\"{}\"", name.replace('"', "\"\""));
        db.run(&format!(
            "select {quoted}.add_job('t', queue_name := 'q');
             select {quoted}.add_job('t', job_key := 'k');
             select {quoted}.add_jobs(array[('t', null, null, null, null, 'k', null, null)]::{quoted}.job_spec[]);
             select {quoted}.reschedule_jobs(array[1], now());
             select {quoted}.permanently_fail_jobs(array[1]);
             select {quoted}.force_unlock_workers(array['w']);
             select {quoted}.complete_jobs(array[1]);
             select {quoted}.remove_job('k')"
        ))
        .await;
        assert_eq!(db.value(&format!("select count(*) from {quoted}.jobs")).await, 0);
    }
}

#[tokio::test]
async fn two_schemas_in_one_database_are_independent() {
    let db = Db::installed().await;
    migrate(&db.pool, "second").await.unwrap();
    db.run("select second.add_job('t', queue_name := 'q', job_key := 'k')").await;
    assert_eq!(db.value("select count(*) from second.jobs").await, 1);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn an_invalid_schema_name_is_rejected_with_the_reason() {
    let db = Db::empty().await;
    for (name, problem) in
        [("", "is empty"), ("a\0b", "contains a NUL"), ("$user", "current role"), (&"x".repeat(64), "63 bytes")]
    {
        let error = migrate(&db.pool, name).await.unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
    let error = migrate(&db.pool, "pg_mine").await.unwrap_err();
    assert!(source(&error).contains("unacceptable schema name"), "{error:?}");
}

fn source(error: &Error) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

/// A role that may log in and nothing else, with a name that is unique in the cluster.
async fn limited_role(db: &Db) -> String {
    let role = db.value("select 'limited_' || current_database()").await.as_str().unwrap().to_owned();
    db.run(&format!("drop role if exists {role}; create role {role} login")).await;
    role
}

async fn drop_role(db: &Db, role: &str) {
    db.run(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn a_role_that_may_not_create_schemas_installs_into_one_that_a_dba_made() {
    let db = Db::empty().await;
    let role = limited_role(&db).await;
    db.run(&format!(
        "create schema graphile_worker;
         create table graphile_worker.migrations (
           id int primary key, ts timestamptz not null default now(), breaking boolean not null default false);
         grant usage, create on schema graphile_worker to {role};
         grant select, insert on graphile_worker.migrations to {role}"
    ))
    .await;
    let mut limited: PgConnection = db.connect_as(&role).await;
    let migration = migrate(&mut limited, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.level, migration.changed), (None, 20, true));
    assert!(!migrate(&mut limited, "graphile_worker").await.unwrap().changed);
    sqlx::raw_sql("select graphile_worker.add_job('t')").execute(&mut limited).await.unwrap();
    drop(limited);
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_role_that_may_not_create_schemas_and_finds_none_gets_an_error() {
    let db = Db::empty().await;
    let role = limited_role(&db).await;
    let error = migrate(&mut db.connect_as(&role).await, "graphile_worker").await.unwrap_err();
    let advice = format!("`create schema \"graphile_worker\" authorization \"{role}\"`");
    assert!(error.to_string().contains(&advice), "{error}");
    assert!(source(&error).contains("permission denied for database"), "{error:?}");
    db.run(advice.trim_matches('`')).await;
    migrate(&mut db.connect_as(&role).await, "graphile_worker").await.unwrap();
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_schema_of_another_application_is_rejected() {
    let db = Db::empty().await;
    db.run("create schema occupied; create table occupied.jobs (id int)").await;
    let error = migrate(&db.pool, "occupied").await.unwrap_err();
    assert!(matches!(error, Error::SchemaOccupied { .. }), "{error}");
}

#[tokio::test]
async fn a_failed_installation_leaves_nothing_behind() {
    let db = Db::empty().await;
    // A view stands in the place of one of our tables.
    db.run("create schema graphile_worker; create view graphile_worker._private_tasks as select 1 as id").await;
    assert!(migrate(&db.pool, "graphile_worker").await.is_err());
    let objects = "select count(*) from pg_class where relnamespace = 'graphile_worker'::regnamespace";
    assert_eq!(db.value(objects).await, 1);
}

#[tokio::test]
async fn a_ledger_with_an_unknown_breaking_id_is_rejected() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker.migrations (id, breaking) values (21, false), (22, true)").await;
    let error = migrate(&db.pool, "graphile_worker").await.unwrap_err();
    assert!(matches!(&error, Error::SchemaTooNew { unknown, known: 20, .. } if unknown == &[22]), "{error:?}");
    assert!(error.to_string().contains("the breaking migration 22 of Node's graphile-worker"), "{error}");
}

#[tokio::test]
async fn a_ledger_with_an_unknown_id_that_is_not_breaking_is_accepted() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker.migrations (id, breaking) values (21, false)").await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.level, migration.changed), (Some(21), 21, false));
}

#[tokio::test]
async fn a_breaking_addition_of_a_newer_release_is_rejected() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._rs_additions (id, breaking) values (77, true)").await;
    let error = migrate(&db.pool, "graphile_worker").await.unwrap_err();
    assert!(error.to_string().contains("the breaking migration 77 of graphile_worker for Rust"), "{error}");
}

const REPLACED_FUNCTION: &str = "
    create or replace function graphile_worker.force_unlock_workers(worker_ids text[]) returns void
    language sql as $$ select 1 $$";

async fn force_unlock_works(db: &Db) -> bool {
    db.run("select graphile_worker.add_job('t'); update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'").await;
    db.run("select graphile_worker.force_unlock_workers(array['w'])").await;
    db.value("select bool_and(is_available) from graphile_worker._private_jobs").await == json!(true)
}

#[tokio::test]
async fn functions_that_another_program_replaced_are_restored() {
    for newer_node in [false, true] {
        let db = Db::installed().await;
        db.run(REPLACED_FUNCTION).await;
        if newer_node {
            db.run("insert into graphile_worker.migrations (id) values (21)").await;
        }
        assert!(!force_unlock_works(&db).await);
        assert!(migrate(&db.pool, "graphile_worker").await.unwrap().changed);
        assert!(force_unlock_works(&db).await);
        assert!(!migrate(&db.pool, "graphile_worker").await.unwrap().changed);
    }
}

#[tokio::test]
async fn functions_are_not_replaced_if_a_newer_node_has_changed_the_tables() {
    let db = Db::installed().await;
    db.run(REPLACED_FUNCTION).await;
    db.run(
        "insert into graphile_worker.migrations (id) values (21);
         alter table graphile_worker._private_job_queues rename column locked_by to owner",
    )
    .await;
    assert!(!migrate(&db.pool, "graphile_worker").await.unwrap().changed);
    assert!(!force_unlock_works(&db).await, "still theirs");
}

#[tokio::test]
async fn functions_are_not_replaced_if_a_newer_node_has_changed_a_signature() {
    let db = Db::installed().await;
    db.run(
        "insert into graphile_worker.migrations (id) values (21);
         drop function graphile_worker.remove_job(text);
         create function graphile_worker.remove_job(job_key text, reason text) returns graphile_worker._private_jobs
         language sql as $$ select null::graphile_worker._private_jobs $$",
    )
    .await;
    assert!(!migrate(&db.pool, "graphile_worker").await.unwrap().changed);
    let functions =
        "select count(*) from pg_proc where proname = 'remove_job' and pronamespace = 'graphile_worker'::regnamespace";
    assert_eq!(db.value(functions).await, 1);
}

#[tokio::test]
async fn a_breaking_step_is_announced_to_running_workers() {
    let db = Db::installed().await;
    db.run("delete from graphile_worker.migrations where id > 18").await;
    let mut listener = Listener::on(&db, "worker:migrate").await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!(migration.to_string(), "schema \"graphile_worker\" updated from level 18 to level 20");
    let announced = json!({"migrationNumber": 19, "breaking": true, "schema": "graphile_worker"});
    assert_eq!(listener.received(&db).await, [announced.clone(), announced], "before, and when it is done");
}

#[tokio::test]
async fn a_breaking_step_waits_for_workers_that_hold_jobs() {
    let db = Db::installed().await;
    db.run(
        "delete from graphile_worker.migrations where id > 18;
         select graphile_worker.add_job('t');
         update graphile_worker._private_jobs set locked_by = 'worker-of-node', locked_at = now()",
    )
    .await;
    let mut listener = Listener::on(&db, "worker:migrate").await;
    let pool = db.pool.clone();
    let migrating = tokio::spawn(async move { migrate(&pool, "graphile_worker").await });
    while listener.received(&db).await.is_empty() {}
    assert_eq!(db.value("select max(id) from graphile_worker.migrations").await, 18);
    let wanted = "select coalesce(json_agg(id), '[]') from graphile_worker._rs_additions where wanted_until > now()";
    assert_eq!(db.value(wanted).await, json!([-19]), "our own workers believe the ledger, not the announcement");
    db.run("update graphile_worker._private_jobs set locked_by = null, locked_at = null").await;
    assert_eq!(migrating.await.unwrap().unwrap().level, 20);
    assert_eq!(db.value("select count(*) from graphile_worker._rs_additions where id < 0").await, 0);
}

#[tokio::test]
async fn indexes_are_built_without_blocking_adds() {
    let db = Db::installed().await;
    db.run(
        "delete from graphile_worker._rs_additions where id = 19;
         drop index graphile_worker._rs_jobs_unqueued, graphile_worker._rs_jobs_in_queues, graphile_worker._rs_jobs_by_queue,
           graphile_worker._rs_jobs_by_kind, graphile_worker._rs_jobs_in_queues_by_task,
           graphile_worker._rs_jobs_in_use",
    )
    .await;
    db.add_job("'t'").await;
    let mut holds_it_up = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('t')").execute(&mut holds_it_up).await.unwrap();
    let pool = db.pool.clone();
    let migrating = tokio::spawn(async move { migrate(&pool, "graphile_worker").await });
    let building = "select count(*) from pg_stat_activity
                    where datname = current_database() and query like '%create index concurrently%'
                      and wait_event_type = 'Lock'";
    until("the index is being built", async || (db.value(building).await == 1).then_some(())).await;
    db.add_job("'t'").await;
    assert!(!migrating.is_finished());
    sqlx::raw_sql("commit").execute(&mut holds_it_up).await.unwrap();
    assert!(migrating.await.unwrap().unwrap().changed);
    let valid = "select count(*) from pg_index join pg_class on pg_class.oid = indexrelid
                 where relname like '\\_rs\\_jobs%' and indisvalid";
    assert_eq!(db.value(valid).await, 7);
    assert!(!migrate(&db.pool, "graphile_worker").await.unwrap().changed);
}

#[tokio::test]
async fn an_index_whose_build_was_interrupted_is_rebuilt() {
    let db = Db::installed().await;
    db.run(
        "delete from graphile_worker._rs_additions where id = 19;
         update pg_index set indisvalid = false where indexrelid = 'graphile_worker._rs_jobs_by_queue'::regclass",
    )
    .await;
    assert!(migrate(&db.pool, "graphile_worker").await.unwrap().changed);
    let is_valid = "select indisvalid from pg_index where indexrelid = 'graphile_worker._rs_jobs_by_queue'::regclass";
    assert_eq!(db.value(is_valid).await, true);
}

#[tokio::test]
async fn a_first_installation_does_not_affect_workers_of_another_schema() {
    let db = Db::installed().await;
    let mut listener = Listener::on(&db, "worker:migrate").await;
    migrate(&db.pool, "second").await.unwrap();
    assert!(listener.received(&db).await.is_empty());
}

#[tokio::test]
async fn a_migration_that_node_left_at_level_16_is_completed() {
    let db = Db::installed().await;
    let whole =
        "select json_agg(relname order by relname) from pg_class where relnamespace = 'graphile_worker'::regnamespace";
    let expected = db.value(whole).await;
    db.run(
        "delete from graphile_worker.migrations where id > 16;
         drop view graphile_worker.jobs;
         drop table graphile_worker._rs_additions;
         create function graphile_worker.tg_jobs__after_insert() returns trigger language plpgsql
           as 'begin notify \"jobs:insert\"; return new; end';
         create trigger _900_after_insert after insert on graphile_worker._private_jobs
           for each statement execute procedure graphile_worker.tg_jobs__after_insert()",
    )
    .await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.level), (Some(16), 20));
    assert_eq!(db.value(whole).await, expected);
    let mut listener = Listener::on(&db, "jobs:insert").await;
    db.add_job("'t'").await;
    assert_eq!(listener.received(&db).await.len(), 1, "the old trigger is gone");
}

#[tokio::test]
async fn a_renamed_schema_gets_functions_with_its_new_name() {
    let db = Db::installed().await;
    db.run("alter schema graphile_worker rename to renamed").await;
    assert!(migrate(&db.pool, "renamed").await.unwrap().changed);
    migrate(&db.pool, "graphile_worker").await.unwrap();
    db.run("select renamed.add_job('t', job_key := 'k')").await;
    assert_eq!(db.value("select count(*) from renamed.jobs").await, 1);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

/// A role that has been given rights on the tables, as a DBA may do who wants no `security definer`.
async fn granted_role(db: &Db, policies_for: &str) -> String {
    let role = limited_role(db).await;
    db.run(&format!(
        "grant usage on schema graphile_worker to {role};
         grant select, insert, update, delete on all tables in schema graphile_worker to {role};
         create policy jobs on graphile_worker._private_jobs for {policies_for} to {role} using (true);
         create policy tasks on graphile_worker._private_tasks for all to {role} using (true);
         create policy queues on graphile_worker._private_job_queues for all to {role} using (true)"
    ))
    .await;
    role
}

#[tokio::test]
async fn a_role_with_rights_on_the_tables_can_use_every_function_and_view() {
    let db = Db::installed().await;
    let role = granted_role(&db, "all").await;
    let mut granted = db.connect_as(&role).await;
    sqlx::raw_sql(
        "select graphile_worker.add_job('t', queue_name := 'q');
         select graphile_worker.add_job('t', job_key := 'k');
         select graphile_worker.add_job('t', job_key := 'd', job_key_mode := 'unsafe_dedupe');
         select graphile_worker.add_jobs(array[('t', null, null, null, null, 'k', null, null)]::graphile_worker.job_spec[]);
         select graphile_worker.remove_job('k')",
    )
    .execute(&mut granted)
    .await
    .unwrap();
    assert!(!migrate(&mut granted, "graphile_worker").await.unwrap().changed);
    drop(granted);
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_role_that_cannot_see_a_job_gets_an_error_instead_of_an_endless_loop() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'k'").await;
    let role = granted_role(&db, "select").await;
    db.run(&format!("create policy add_jobs on graphile_worker._private_jobs for insert to {role} with check (true)"))
        .await;
    let mut granted = db.connect_as(&role).await;
    for call in ["add_job('t', job_key := 'k', job_key_mode := 'unsafe_dedupe')", "remove_job('k')"] {
        let error = crate::support::rows(&mut granted, &format!("select graphile_worker.{call}")).await.unwrap_err();
        let message = error.into_database_error().unwrap().message().to_owned();
        assert_eq!(message, "The job with key 'k' exists, but this role can neither see nor change it.", "{call}");
    }
    drop(granted);
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn creating_the_triggers_waits_for_an_open_transaction_but_lets_others_work_meanwhile() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t');
         delete from graphile_worker._rs_additions where id = 18;
         drop trigger _rs_keep_used_queue on graphile_worker._private_job_queues",
    )
    .await;
    let mut open = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('t', queue_name := 'new')").execute(&mut open).await.unwrap();
    let pool = db.pool.clone();
    let migrating = tokio::spawn(async move { migrate(&pool, "graphile_worker").await });
    until_a_session_waits_for_a_lock(&db).await;
    db.add_job("'t', queue_name := 'newer'").await;
    assert!(!migrating.is_finished());
    sqlx::raw_sql("commit").execute(&mut open).await.unwrap();
    assert!(migrating.await.unwrap().unwrap().changed);
    let triggers = "select count(*) from pg_trigger where tgname = '_rs_keep_used_queue'";
    assert_eq!(db.value(triggers).await, 1);
}

#[tokio::test]
async fn every_addition_has_a_comment() {
    let db = Db::installed().await;
    let undescribed = "
        select coalesce(json_agg(name order by name), '[]') from (
          select relname as name from pg_class
          where relnamespace = 'graphile_worker'::regnamespace and relname like '\\_rs\\_%' and relkind in ('r', 'i')
            and relname not like '%\\_pkey' and obj_description(oid, 'pg_class') is null
          union all
          select proname from pg_proc
          where pronamespace = 'graphile_worker'::regnamespace and proname like '\\_rs\\_%'
            and obj_description(oid, 'pg_proc') is null
        ) as objects";
    assert_eq!(db.value(undescribed).await, serde_json::json!([]));
}
