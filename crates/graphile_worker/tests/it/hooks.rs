//! Hooks observe every event of a job in order, and three of them override what happens.

use crate::support::{Db, until};
use graphile_worker::{
    AfterJobRun, BeforeJobRun, BeforeJobSchedule, Error, FetchEmpty, FetchStart, HookRegistry, HookResult, JobComplete,
    JobError, JobFailed, JobScheduleResult, JobSpec, JobStart, JobSuccess, ListenConnecting, ListenSuccess, Plugin,
    WorkerOptions, WorkerShutdown, WorkerStart, WorkerStop,
};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Heard {
    fn say(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl Plugin for Heard {
    fn register(self, hooks: &mut HookRegistry) {
        macro_rules! hear {
            ($($event:ident),*) => {
                $(
                    let heard = self.clone();
                    hooks.on($event, move |ctx| {
                        heard.say(match ctx.error {
                            Some(error) => format!("{}: {error}", stringify!($event)),
                            None => stringify!($event).to_owned(),
                        });
                        async {}
                    });
                )*
            };
        }
        let heard = self.clone();
        hooks.on(WorkerShutdown, move |ctx| {
            heard.say(format!("WorkerShutdown: {:?}", ctx.reason));
            async {}
        });
        hear!(WorkerStart, WorkerStop, ListenConnecting, ListenSuccess, FetchStart, FetchEmpty);
        hear!(JobStart, JobSuccess, JobError, JobFailed, JobComplete);
    }
}

fn options(db: &Db) -> WorkerOptions {
    WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(1)
}

#[tokio::test]
async fn hooks_observe_a_success_and_a_permanent_failure_in_order() {
    let db = Db::installed().await;
    db.add_job("'good'").await;
    let heard = Heard::default();
    let worker = |heard: &Heard| {
        options(&db)
            .add_plugin(heard.clone())
            .define_task("good", |_: Value, _| async {})
            .define_task("bad", |_: Value, _| async { Err::<(), _>("oops") })
    };
    worker(&heard).init().await.unwrap().run_once().await.unwrap();
    let expected = [
        "WorkerStart",
        "FetchStart",
        "JobStart",
        "JobSuccess",
        "FetchStart",
        "JobComplete",
        "FetchEmpty",
        "WorkerStop",
    ];
    let told = heard.all();
    for event in expected {
        assert!(told.contains(&event.to_owned()), "{event} in {told:?}");
    }
    let place = |event: &str| told.iter().position(|told| told == event).unwrap();
    assert!(place("WorkerStart") < place("JobStart") && place("JobStart") < place("JobSuccess"));
    assert!(place("JobSuccess") < place("JobComplete") && place("JobComplete") < place("WorkerStop"));

    let heard = Heard::default();
    db.add_job("'bad', max_attempts := 1").await;
    worker(&heard).init().await.unwrap().run_once().await.unwrap();
    let told: Vec<String> = heard.all().into_iter().filter(|event| event.starts_with("Job")).collect();
    assert_eq!(told, ["JobStart", "JobError: oops", "JobFailed: oops", "JobComplete: oops"]);
}

#[tokio::test]
async fn hooks_observe_listening_and_stopping() {
    let db = Db::installed().await;
    let heard = Heard::default();
    let worker =
        Arc::new(options(&db).add_plugin(heard.clone()).define_task("t", |_: Value, _| async {}).init().await.unwrap());
    let running = tokio::spawn({
        let worker = worker.clone();
        async move { worker.run().await }
    });
    until("the worker listens", async || heard.all().contains(&"ListenSuccess".to_owned()).then_some(())).await;
    worker.request_shutdown();
    running.await.unwrap().unwrap();
    let told = heard.all();
    assert!(told.contains(&"ListenConnecting".to_owned()));
    assert_eq!(told[told.len() - 2..], ["WorkerShutdown: Graceful", "WorkerStop"]);
}

#[tokio::test]
async fn hooks_observe_the_start_and_stop_of_a_worker_that_was_stopped_before_it_started() {
    let db = Db::installed().await;
    let heard = Heard::default();
    let worker = options(&db).add_plugin(heard.clone()).define_task("t", |_: Value, _| async {}).init().await.unwrap();
    worker.request_shutdown();
    worker.run().await.unwrap();
    let told: Vec<String> = heard.all().into_iter().filter(|event| event.starts_with("Worker")).collect();
    assert_eq!(told, ["WorkerStart", "WorkerShutdown: Graceful", "WorkerStop"]);
}

#[tokio::test]
async fn a_hook_decides_whether_a_job_runs_and_overrides_its_outcome() {
    let db = Db::installed().await;
    for payload in ["skip", "fail", "run", "rescue"] {
        db.add_job(&format!("'t', '{}'", json!(payload))).await;
    }
    let heard = Heard::default();
    let ran = heard.clone();
    options(&db)
        .on(BeforeJobRun, |ctx| async move {
            match ctx.payload.as_str() {
                Some("skip") => HookResult::Skip,
                Some("fail") => HookResult::Fail("not today".to_owned()),
                _ => HookResult::Continue,
            }
        })
        .on(AfterJobRun, |ctx| async move {
            match (ctx.error, ctx.job.payload.get()) {
                (Some(_), "\"rescue\"") => HookResult::Skip,
                _ => HookResult::Continue,
            }
        })
        .define_task("t", move |payload: String, _| {
            ran.say(payload.clone());
            async move { if payload == "rescue" { Err("oops") } else { Ok(()) } }
        })
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    assert_eq!(heard.all(), ["run", "rescue"]);
    let left = db.rows("select payload, last_error from graphile_worker._private_jobs").await;
    assert_eq!(left, [json!({"payload": "fail", "last_error": "not today"})]);
}

#[tokio::test]
async fn a_hook_changes_or_rejects_a_job_before_it_is_added() {
    let db = Db::installed().await;
    let worker = options(&db)
        .on(BeforeJobSchedule, |mut job| async move {
            if job.identifier == "forbidden" {
                return JobScheduleResult::Refuse("it is switched off".to_owned());
            }
            job.payload["traced"] = json!(true);
            JobScheduleResult::Add(job)
        })
        .define_task("t", |_: Value, _| async {})
        .init()
        .await
        .unwrap();
    let utils = worker.create_utils();
    let job = utils.add_raw_job("t", json!({"a": 1}), JobSpec::default()).await.unwrap();
    assert_eq!(job.payload.get(), r#"{"a":1,"traced":true}"#);
    let error = utils.add_raw_job("forbidden", json!({}), JobSpec::default()).await.unwrap_err();
    assert!(matches!(error, Error::JobRejected { .. }));
    assert_eq!(error.to_string(), "a hook rejected a job of task \"forbidden\": it is switched off");
}

#[tokio::test]
async fn hooks_observe_a_job_that_its_handler_completed() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let heard = Heard::default();
    let worker = options(&db)
        .add_plugin(heard.clone())
        .define_task("t", |_: Value, ctx: graphile_worker::WorkerContext| async move {
            let transaction = ctx.pg_pool().begin().await?;
            ctx.complete_in(transaction).await?;
            Ok::<(), graphile_worker::TaskError>(())
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert!(heard.all().contains(&"JobComplete".to_owned()), "{:?}", heard.all());
}

#[tokio::test]
async fn hooks_observe_the_duration_of_a_job_and_whether_it_will_be_retried() {
    let db = Db::installed().await;
    db.add_job("'sleeps', max_attempts := 2").await;
    db.add_job("'sleeps', max_attempts := 1, priority := 1").await;
    db.add_job("'good', priority := 2").await;
    let told = Arc::new(Mutex::new(Vec::<(i64, &str, bool, bool)>::new()));
    let mut worker = options(&db)
        .define_task("sleeps", |_: Value, _| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Err::<(), _>("oops")
        })
        .define_task("good", |_: Value, _| async { tokio::time::sleep(Duration::from_millis(20)).await });
    macro_rules! tell {
        ($($event:ident),*) => {
            $(
                let sink = told.clone();
                worker = worker.on($event, move |ctx| {
                    let has_run = ctx.duration >= Duration::from_millis(20);
                    sink.lock().unwrap().push((ctx.job.id, stringify!($event), has_run, ctx.will_retry));
                    async {}
                });
            )*
        };
    }
    tell!(JobStart, JobSuccess, JobError, JobFailed);
    worker.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(
        *told.lock().unwrap(),
        [
            (1, "JobStart", false, false),
            (1, "JobError", true, true),
            (2, "JobStart", false, false),
            (2, "JobError", true, false),
            (2, "JobFailed", true, false),
            (3, "JobStart", false, false),
            (3, "JobSuccess", true, false),
        ]
    );
}
