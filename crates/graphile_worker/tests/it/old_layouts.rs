//! Databases that older releases of Node's worker left. The tables here have the columns of those
//! releases and no more; `interop/` does the same with databases that the real releases have made.

use crate::support::{Db, Listener};
use graphile_worker::{Error, migrate, migrate_with_max_wait};
use serde_json::{Value, json};
use std::time::Duration;

/// Levels 5 to 10, as of 0.8 to 0.13: names in the job itself, `int` for the numbers.
pub(crate) const BY_NAME: &str = r#"
    create schema graphile_worker;
    create table graphile_worker.migrations (id int primary key, ts timestamptz default now() not null);
    insert into graphile_worker.migrations (id) select generate_series(1, 10);
    create table graphile_worker.job_queues (
      queue_name text primary key, job_count int not null, locked_at timestamptz, locked_by text);
    create table graphile_worker.jobs (
      id bigserial primary key, queue_name text, task_identifier text not null,
      payload json not null default '{}', priority int not null default 0,
      run_at timestamptz not null default now(), attempts int not null default 0,
      max_attempts int not null default 25, last_error text,
      created_at timestamptz not null default now(), updated_at timestamptz not null default now(),
      key text unique check (length(key) > 0), locked_at timestamptz, locked_by text,
      revision int not null default 0, flags jsonb);
    create index jobs_priority_run_at_id_locked_at_without_failures_idx
      on graphile_worker.jobs (priority, run_at, id, locked_at) where attempts < max_attempts;
    create table graphile_worker.known_crontabs (
      identifier text primary key, known_since timestamptz not null, last_execution timestamptz);
    create function graphile_worker.tg__update_timestamp() returns trigger language plpgsql
      as 'begin new.updated_at = now(); return new; end';
    create trigger _100_timestamps before update on graphile_worker.jobs
      for each row execute procedure graphile_worker.tg__update_timestamp();
    create function graphile_worker.add_job(identifier text, payload json = null) returns graphile_worker.jobs
      language sql as 'select null::graphile_worker.jobs';
    create function graphile_worker.get_job(worker_id text) returns graphile_worker.jobs
      language sql as 'select null::graphile_worker.jobs';
    insert into graphile_worker.job_queues (queue_name, job_count) values ('q', 2), ('unused', 0);
    insert into graphile_worker.jobs
      (id, queue_name, task_identifier, payload, priority, run_at, attempts, max_attempts, last_error,
       created_at, updated_at, key, revision, flags)
    values
      (3, 'q', 'email', '{"b": 1,  "a": "\u0000"}', -7, '2030-01-01Z', 2, 9, 'it''s broken', '2020-01-01Z',
       '2020-01-02Z', 'k', 4, '{"x": true}'),
      (5, null, 'email', '[]', 100000, '2020-01-01Z', 0, 25, null, '2020-01-01Z', '2020-01-01Z', null, 0, null),
      (8, 'q', 'report', '1', 0, '2020-01-01Z', 25, 25, 'given up', '2020-01-01Z', '2020-01-01Z', null, 0, null);
    select setval('graphile_worker.jobs_id_seq', 41);
    insert into graphile_worker.known_crontabs values ('nightly', '2020-01-01Z', '2026-01-01Z');
"#;

/// Levels 11 to 14, as of 0.14 and 0.15: the columns of today in tables with other names.
pub(crate) const BY_ID: &str = r#"
    create schema graphile_worker;
    create table graphile_worker.migrations (id int primary key, ts timestamptz default now() not null);
    insert into graphile_worker.migrations (id) select generate_series(1, 14);
    create table graphile_worker.tasks (id int generated always as identity, identifier text not null,
      constraint tasks_pkey primary key (id), constraint tasks_identifier_key unique (identifier));
    create table graphile_worker.job_queues (id int generated always as identity, queue_name text not null,
      locked_at timestamptz, locked_by text,
      is_available bool generated always as (locked_at is null) stored not null,
      constraint job_queues_pkey1 primary key (id), constraint job_queues_queue_name_key unique (queue_name));
    create table graphile_worker.jobs (id bigint generated always as identity, job_queue_id int,
      task_id int not null, payload json not null default '{}', priority smallint not null default 0,
      run_at timestamptz not null default now(), attempts smallint not null default 0,
      max_attempts smallint not null default 25, last_error text, created_at timestamptz not null default now(),
      updated_at timestamptz not null default now(), key text, locked_at timestamptz, locked_by text,
      revision int not null default 0, flags jsonb,
      is_available bool generated always as (locked_at is null and attempts < max_attempts) stored not null,
      constraint jobs_pkey1 primary key (id), constraint jobs_key_key1 unique (key));
    create index jobs_main_index on graphile_worker.jobs (priority, run_at) where is_available;
    create table graphile_worker.known_crontabs (
      identifier text primary key, known_since timestamptz not null, last_execution timestamptz);
    create type graphile_worker.job_spec as (identifier text, payload json);
    create function graphile_worker.add_jobs(specs graphile_worker.job_spec[]) returns setof graphile_worker.jobs
      language sql as 'select null::graphile_worker.jobs';
    insert into graphile_worker.tasks (identifier) values ('unused'), ('email'), ('report');
    insert into graphile_worker.job_queues (queue_name) values ('unused'), ('q');
    insert into graphile_worker.jobs
      (id, job_queue_id, task_id, payload, priority, run_at, attempts, max_attempts, last_error,
       created_at, updated_at, key, revision, flags)
    overriding system value values
      (3, 2, 2, '{"b": 1,  "a": "\u0000"}', -7, '2030-01-01Z', 2, 9, 'it''s broken', '2020-01-01Z',
       '2020-01-02Z', 'k', 4, '{"x": true}'),
      (5, null, 2, '[]', 32767, '2020-01-01Z', 0, 25, null, '2020-01-01Z', '2020-01-01Z', null, 0, null),
      (8, 2, 3, '1', 0, '2020-01-01Z', 25, 25, 'given up', '2020-01-01Z', '2020-01-01Z', null, 0, null);
    select setval(pg_get_serial_sequence('graphile_worker.jobs', 'id'), 41);
    insert into graphile_worker.known_crontabs values ('nightly', '2020-01-01Z', '2026-01-01Z');
"#;

async fn jobs(db: &Db) -> Value {
    db.value(
        "select json_agg(json_build_array(id, task_identifier, queue_name, payload::text, priority, run_at, attempts,
           max_attempts, last_error, created_at, updated_at, key, revision, jobs.flags, locked_at) order by id)
         from graphile_worker.jobs
         join (select id, payload from graphile_worker._private_jobs) as payloads using (id)",
    )
    .await
}

#[tokio::test]
async fn every_job_of_an_old_layout_is_kept_as_it_was() {
    for (layout, level) in [(BY_NAME, 10), (BY_ID, 14)] {
        let db = Db::empty().await;
        db.run(layout).await;
        let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
        assert_eq!(
            migration.to_string(),
            format!("schema \"graphile_worker\" updated from level {level} to level 20, 3 jobs moved")
        );
        let old = "2020-01-01T00:00:00+00:00";
        let expected = json!([
            [
                3, "email", "q", "{\"b\": 1,  \"a\": \"\\u0000\"}", -7, "2030-01-01T00:00:00+00:00", 2, 9,
                "it's broken", old, "2020-01-02T00:00:00+00:00", "k", 4, {"x": true}, null
            ],
            [5, "email", null, "[]", 32767, old, 0, 25, null, old, old, null, 0, null, null],
            [8, "report", "q", "1", 0, old, 25, 25, "given up", old, old, null, 0, null, null]
        ]);
        assert_eq!(jobs(&db).await, expected);
        assert_eq!(
            db.row("select * from graphile_worker._private_known_crontabs").await,
            json!({"identifier": "nightly", "known_since": old, "last_execution": "2026-01-01T00:00:00+00:00"})
        );
        assert_eq!(db.add_job("'new'").await["id"], 42, "an id that was given out once is not given out again");
        assert!(!migrate(&db.pool, "graphile_worker").await.unwrap().changed);
    }
}

#[tokio::test]
async fn an_old_layout_ends_with_the_same_objects_as_an_empty_database() {
    let objects = "
        select coalesce(json_agg(object order by object), '[]') from (
          select relkind::text || ' ' || relname from pg_class
          where relnamespace = 'graphile_worker'::regnamespace and relkind <> 'S'
          union all
          select proname from pg_proc where pronamespace = 'graphile_worker'::regnamespace
          union all
          select conname || ' ' || pg_get_constraintdef(oid) from pg_constraint
          where connamespace = 'graphile_worker'::regnamespace
        ) as all_objects (object)";
    let expected = Db::installed().await.value(objects).await;
    for layout in [BY_NAME, BY_ID] {
        let db = Db::empty().await;
        db.run(layout).await;
        migrate(&db.pool, "graphile_worker").await.unwrap();
        assert_eq!(db.value(objects).await, expected);
    }
}

#[tokio::test]
async fn the_first_releases_columns_are_enough() {
    let db = Db::empty().await;
    db.run(BY_NAME).await;
    db.run(
        "alter table graphile_worker.jobs drop column key, drop column locked_at, drop column locked_by,
           drop column revision, drop column flags;
         drop table graphile_worker.known_crontabs;
         delete from graphile_worker.migrations where id > 2",
    )
    .await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.moved_jobs), (Some(2), 3));
    assert_eq!(db.value("select json_agg(id order by id) from graphile_worker.jobs").await, json!([3, 5, 8]));
}

#[tokio::test]
async fn a_job_whose_task_was_deleted_is_kept() {
    let db = Db::empty().await;
    db.run(BY_ID).await;
    db.run("delete from graphile_worker.tasks where identifier = 'report'").await;
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!(migration.moved_jobs, 3);
    assert_eq!(db.value("select task_identifier from graphile_worker.jobs where id = 8").await, "deleted task 3");
}

#[tokio::test]
async fn an_old_layout_with_running_jobs_is_rejected_and_not_changed() {
    for (layout, locked) in [
        (BY_NAME, "update graphile_worker.jobs set locked_at = now(), locked_by = 'worker-1' where id = 3"),
        (BY_ID, "update graphile_worker.jobs set locked_at = now(), locked_by = 'worker-1' where id = 3"),
        (
            BY_NAME,
            "update graphile_worker.job_queues set locked_at = now(), locked_by = 'worker-1' where queue_name = 'q'",
        ),
    ] {
        let db = Db::empty().await;
        db.run(layout).await;
        db.run(locked).await;
        let error = migrate_with_max_wait(Duration::ZERO, &db.pool, "graphile_worker").await.unwrap_err();
        assert!(matches!(error, Error::JobsRunning { held: 1, .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains("its jobs and queues are still locked (1 locks of worker-1). Stop the workers"),
            "{message}"
        );
        assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 3);
        assert_eq!(db.value("select to_regclass('graphile_worker._private_jobs')").await, Value::Null);
    }
}

#[tokio::test]
async fn stale_locks_do_not_delay_a_migration_of_an_old_layout() {
    let db = Db::empty().await;
    db.run(BY_NAME).await;
    db.run("update graphile_worker.jobs set locked_at = now() - interval '5 hours', locked_by = 'dead' where id = 5")
        .await;
    migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!(db.value("select locked_by from graphile_worker.jobs where id = 5").await, Value::Null);
}

#[tokio::test]
async fn a_view_of_the_application_on_the_old_table_is_not_dropped() {
    let db = Db::empty().await;
    db.run(BY_NAME).await;
    db.run("create view my_report as select id from graphile_worker.jobs").await;
    let error = migrate(&db.pool, "graphile_worker").await.unwrap_err();
    assert!(format!("{error:?}").contains("my_report"), "{error:?}");
    assert_eq!(db.value("select count(*) from my_report").await, 3);
}

#[tokio::test]
async fn migrating_an_old_layout_announces_each_breaking_step() {
    let db = Db::empty().await;
    db.run(BY_NAME).await;
    let mut listener = Listener::on(&db, "worker:migrate").await;
    migrate(&db.pool, "graphile_worker").await.unwrap();
    let ids: Vec<Value> =
        listener.received(&db).await.iter().map(|payload| payload["migrationNumber"].clone()).collect();
    assert_eq!(ids, [11, 13, 14, 16, 19, 11, 13, 14, 16, 19], "before, and when it is done");
}

#[tokio::test]
async fn an_old_layout_is_moved_as_soon_as_its_jobs_have_finished() {
    let db = Db::empty().await;
    db.run(BY_NAME).await;
    db.run("update graphile_worker.jobs set locked_at = now(), locked_by = 'worker-1' where id = 3").await;
    let mut listener = Listener::on(&db, "worker:migrate").await;
    let pool = db.pool.clone();
    let migrating = tokio::spawn(async move { migrate(&pool, "graphile_worker").await });
    while listener.received(&db).await.is_empty() {}
    db.run("update graphile_worker.jobs set locked_at = null, locked_by = null").await;
    assert_eq!(migrating.await.unwrap().unwrap().moved_jobs, 3);
}
