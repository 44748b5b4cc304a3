//! The SQL that the documentation of the original system shows, as a user would type it.

use crate::support::Db;
use serde_json::json;

#[tokio::test]
async fn a_job_with_a_payload_built_in_sql() {
    let db = Db::installed().await;
    db.run("SELECT graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'));").await;
    db.run(
        "SELECT graphile_worker.add_job(
           'send_email',
           json_build_object(
             'to', 'someone@example.com',
             'subject', 'graphile-worker test'
           )
         );",
    )
    .await;
    let payloads = db.value("select json_agg(payload order by id) from graphile_worker._private_jobs").await;
    assert_eq!(
        payloads,
        json!([{"name": "Bobby Tables"}, {"to": "someone@example.com", "subject": "graphile-worker test"}])
    );
}

#[tokio::test]
async fn a_reminder_in_two_days() {
    let db = Db::installed().await;
    db.run("SELECT graphile_worker.add_job('reminder', run_at := NOW() + INTERVAL '2 days');").await;
    let waits = "select run_at - created_at = interval '2 days' from graphile_worker.jobs";
    assert_eq!(db.value(waits).await, true);
}

#[tokio::test]
async fn a_statement_with_parameters_and_a_delay_in_seconds() {
    let db = Db::installed().await;
    // As any client does it: the statement is prepared, its parameters are typed by the driver.
    db.run(
        "PREPARE add (text, json, text, int, float8) AS SELECT graphile_worker.add_job(
           $1,
           payload := $2,
           queue_name := $3,
           max_attempts := $4,
           run_at := NOW() + ($5 * INTERVAL '1 second')
         );
         EXECUTE add('task', '{\"a\": 1}', 'queue', 5, 90)",
    )
    .await;
    assert_eq!(db.value("select max_attempts from graphile_worker.jobs where queue_name = 'queue'").await, 5);
    assert_eq!(db.value("select run_at - created_at = interval '90 seconds' from graphile_worker.jobs").await, true);
}

#[tokio::test]
async fn a_trigger_that_adds_a_job() {
    let db = Db::installed().await;
    db.run("CREATE TABLE my_table (id int)").await;
    db.run(
        "CREATE FUNCTION my_table_created() RETURNS trigger AS $$
         BEGIN
           PERFORM graphile_worker.add_job('task_identifier_here', json_build_object('id', NEW.id));
           RETURN NEW;
         END;
         $$ LANGUAGE plpgsql VOLATILE;

         CREATE TRIGGER trigger_name AFTER INSERT ON my_table FOR EACH ROW EXECUTE PROCEDURE my_table_created();",
    )
    .await;
    db.run("INSERT INTO my_table VALUES (7), (8)").await;
    let payloads = db.value("select json_agg(payload order by id) from graphile_worker._private_jobs").await;
    assert_eq!(payloads, json!([{"id": 7}, {"id": 8}]));
}

#[tokio::test]
async fn one_trigger_function_for_many_tables() {
    let db = Db::installed().await;
    db.run(
        "CREATE TABLE user_emails (id int, verified bool); CREATE TABLE users (id int); CREATE TABLE pdfs (id int, title text);
         CREATE FUNCTION trigger_job() RETURNS trigger AS $$
         BEGIN
           PERFORM graphile_worker.add_job(TG_ARGV[0], json_build_object(
             'schema', TG_TABLE_SCHEMA,
             'table', TG_TABLE_NAME,
             'op', TG_OP,
             'id', (CASE WHEN TG_OP = 'DELETE' THEN OLD.id ELSE NEW.id END)
           ));
           RETURN NEW;
         END;
         $$ LANGUAGE plpgsql VOLATILE;
         CREATE TRIGGER send_verification_email
           AFTER INSERT ON user_emails
           FOR EACH ROW
           WHEN (NEW.verified is false)
           EXECUTE PROCEDURE trigger_job('send_verification_email');
         CREATE TRIGGER user_changed
           AFTER INSERT OR UPDATE OR DELETE ON users
           FOR EACH ROW
           EXECUTE PROCEDURE trigger_job('user_changed');
         CREATE TRIGGER generate_pdf
           AFTER INSERT ON pdfs
           FOR EACH ROW
           EXECUTE PROCEDURE trigger_job('generate_pdf');
         CREATE TRIGGER generate_pdf_update
           AFTER UPDATE ON pdfs
           FOR EACH ROW
           WHEN (NEW.title IS DISTINCT FROM OLD.title)
           EXECUTE PROCEDURE trigger_job('generate_pdf');",
    )
    .await;
    db.run(
        "INSERT INTO user_emails VALUES (1, false), (2, true);
         INSERT INTO users VALUES (3); UPDATE users SET id = 4; DELETE FROM users;
         INSERT INTO pdfs VALUES (5, 'a'); UPDATE pdfs SET title = 'a'; UPDATE pdfs SET title = 'b'",
    )
    .await;
    let jobs = db
        .value(
            "select json_agg(task_identifier || ' ' || (payload ->> 'op') || ' ' || (payload ->> 'id') order by id)
             from graphile_worker.jobs join (select id, payload from graphile_worker._private_jobs) p using (id)",
        )
        .await;
    assert_eq!(
        jobs,
        json!([
            "send_verification_email INSERT 1",
            "user_changed INSERT 3",
            "user_changed UPDATE 4",
            "user_changed DELETE 4",
            "generate_pdf INSERT 5",
            "generate_pdf UPDATE 5"
        ])
    );
}

#[tokio::test]
async fn the_later_of_two_jobs_with_one_key_runs_once() {
    let db = Db::installed().await;
    db.run(
        "BEGIN;
         SELECT graphile_worker.add_job('send_email', '{\"count\": 1}', job_key := 'abc');
         SELECT graphile_worker.add_job('send_email', '{\"count\": 2}', job_key := 'abc');
         COMMIT;",
    )
    .await;
    assert_eq!(db.value("select json_agg(payload) from graphile_worker._private_jobs").await, json!([{"count": 2}]));
    db.run("SELECT graphile_worker.remove_job('abc');").await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn events_gather_in_one_job_until_its_time_comes() {
    let db = Db::installed().await;
    for event in [1, 2] {
        db.run(&format!(
            "SELECT graphile_worker.add_job(
               'process_events',
               '[{{\"id\": {event}}}]'::json,
               job_key := 'my_batch',
               job_key_mode := 'preserve_run_at',
               run_at := NOW() + INTERVAL '10 seconds'
             );"
        ))
        .await;
    }
    let job = db
        .row(
            "select payload, run_at - created_at = interval '10 seconds' as on_time from graphile_worker._private_jobs",
        )
        .await;
    assert_eq!(job, json!({"payload": [{"id": 1}, {"id": 2}], "on_time": true}));
}

#[tokio::test]
async fn administration() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 3)").await;
    db.run("SELECT * FROM graphile_worker.complete_jobs(ARRAY[1, 99, 38674])").await;
    db.run("SELECT * FROM graphile_worker.permanently_fail_jobs(ARRAY[2, 99, 38674], 'Enter reason here')").await;
    db.run(
        "SELECT * FROM graphile_worker.reschedule_jobs(
           ARRAY[3, 99, 38674],
           run_at := NOW() + interval '5 minutes',
           priority := 5,
           attempts := 5,
           max_attempts := 25
         );",
    )
    .await;
    let jobs = db.rows("select id, attempts, priority, last_error from graphile_worker.jobs order by id").await;
    assert_eq!(
        jobs,
        [
            json!({"id": 2, "attempts": 25, "priority": 0, "last_error": "Enter reason here"}),
            json!({"id": 3, "attempts": 5, "priority": 5, "last_error": null})
        ]
    );
}

#[tokio::test]
async fn the_documented_back_off() {
    let db = Db::installed().await;
    let delays = db
        .rows(
            "select
               attempt,
               exp(least(10, attempt)) * interval '1 second' as delay,
               sum(exp(least(10, attempt)) * interval '1 second') over (order by attempt asc) total_delay
             from generate_series(1, 24) as attempt",
        )
        .await;
    assert_eq!(delays[0]["delay"], "00:00:02.718282");
    assert_eq!(delays[23]["total_delay"], "95:20:14.294975");
}

#[tokio::test]
async fn the_uninstallation_leaves_nothing() {
    let db = Db::installed().await;
    db.run("DROP SCHEMA graphile_worker CASCADE;").await;
    assert_eq!(db.value("select to_regnamespace('graphile_worker')").await, json!(null));
}
