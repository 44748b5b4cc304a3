//! Scripts and programs that are rate limited by a service: the job has not failed, and its limit is closed.

use crate::helpers::{Project, options};
use crate::support::Db;
use serde_json::{Value, json};

/// A database with a task under a limit, in a group.
async fn limited() -> Db {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    db.run(
        "select graphile_worker._rs_set_limit('group:api', concurrency => 5);
         select graphile_worker._rs_set_limit('task:t', concurrency => 5, group_name => 'api');
         select graphile_worker._rs_settle_lanes()",
    )
    .await;
    db
}

/// The state of the job, and for how many seconds each limit is closed.
async fn outcome(db: &Db) -> Value {
    db.value(
        "select json_build_object(
           'attempts', (select attempts from graphile_worker._private_jobs),
           'error', (select last_error from graphile_worker._private_jobs),
           'closed', (select json_object_agg(name, round(extract(epoch from closed_until - now()) / 10) * 10 order by name)
                      from graphile_worker._rs_limits where closed_until > now()))",
    )
    .await
}

async fn run(db: &Db, project: &Project) {
    options(db, project).init().await.unwrap().run_once().await.unwrap();
}

fn closed(limit: &str) -> Value {
    json!({ "attempts": 0, "error": "rate limited: runs again after 60s", "closed": { limit: 60 } })
}

#[tokio::test]
async fn a_script_throws_what_its_helper_returns() {
    for (name, body) in [
        ("t.js", "module.exports = async (payload, { rateLimited }) => { throw rateLimited(60); };"),
        ("t.mjs", "export default async () => { throw Object.assign(new Error('429'), { rateLimitedFor: 60 }); };"),
        ("t.py", "def task(payload, helpers):\n  raise helpers.rate_limited(60)"),
        ("t.py", "async def task(payload, helpers):\n  raise helpers.rate_limited(60.0)"),
    ] {
        let (db, project) = (limited().await, Project::new());
        project.task(name, body);
        run(&db, &project).await;
        assert_eq!(outcome(&db).await, closed("task:t"), "{name}: {body}");
    }
}

#[tokio::test]
async fn a_script_names_another_limit() {
    for (name, body) in [
        ("t.js", "module.exports = async (payload, helpers) => { throw helpers.rateLimited(60, 'group:api'); };"),
        ("t.py", "def task(payload, helpers):\n  raise helpers.rate_limited(60, 'group:api')"),
    ] {
        let (db, project) = (limited().await, Project::new());
        project.task(name, body);
        run(&db, &project).await;
        assert_eq!(outcome(&db).await, closed("group:api"), "{name}: {body}");
    }
}

#[tokio::test]
async fn a_script_with_a_delay_that_is_none_fails() {
    for (name, body, error) in [
        (
            "t.js",
            "module.exports = async (payload, helpers) => { throw helpers.rateLimited('soon'); };",
            "rateLimited: the delay must be a number of seconds and at least 0, got 'soon'",
        ),
        (
            "t.py",
            "def task(payload, helpers):\n  raise helpers.rate_limited(-1)",
            "rate_limited: the delay must be a number of seconds and at least 0, got -1",
        ),
        (
            "t.py",
            "def task(payload, helpers):\n  raise helpers.rate_limited(1, 2)",
            "rate_limited: the limit must be a name such as 'group:api', got 2",
        ),
    ] {
        let (db, project) = (limited().await, Project::new());
        project.task(name, body);
        run(&db, &project).await;
        let outcome = outcome(&db).await;
        assert!(outcome["error"].as_str().unwrap().starts_with(error), "{outcome}");
        assert_eq!((&outcome["attempts"], &outcome["closed"]), (&json!(1), &Value::Null));
    }
}

#[tokio::test]
async fn a_program_exits_with_code_75_and_says_when_to_retry() {
    for (line, expected) in [
        ("Retry-After: 60", closed("task:t")),
        ("Retry-After: 60 group:api", closed("group:api")),
        ("nothing", json!({ "attempts": 1, "error": "exited with code 75:\nnothing", "closed": null })),
    ] {
        use std::os::unix::fs::PermissionsExt;
        let (db, project) = (limited().await, Project::new());
        project.file("tasks/t", &format!("#!/bin/sh\necho '{line}' >&2\nexit 75\n"));
        std::fs::set_permissions(project.tasks().join("t"), std::fs::Permissions::from_mode(0o755)).unwrap();
        run(&db, &project).await;
        assert_eq!(outcome(&db).await, expected);
    }
}
