//! What recurs: the clock, moved by hand; each tick once, and what was missed.

use crate::support::{Db, Log, Started};
use chrono::{DateTime, TimeDelta, Utc};
use graphile_worker::{
    BeforeJobSchedule, Cron, CronJobBackfilled, CronJobScheduled, CronTick, Crontab, CrontabFill, CrontabJobKeyMode,
    IntoTaskHandlerResult, JobScheduleResult, Schedule, TaskHandler, TestClock, Tz, WorkerContext, WorkerOptions,
    parse_crontab,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct SendDailyReport {
    to: String,
}

impl TaskHandler for SendDailyReport {
    const IDENTIFIER: &'static str = "send_daily_report";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {}
}

pub(crate) fn time(text: &str) -> DateTime<Utc> {
    format!("2026-03-10T{text}Z").parse().unwrap()
}

/// A worker with a clock of its own that runs no jobs, so that they can be counted.
pub(crate) struct Clocked {
    pub(crate) started: Started,
    pub(crate) clock: TestClock,
    looks: mpsc::UnboundedReceiver<DateTime<Utc>>,
}

impl Clocked {
    async fn new(db: &Db, crontab: &str, now: &str) -> Clocked {
        Clocked::with(WorkerOptions::default().pg_pool(db.pool.clone()).with_cron(crontab).unwrap(), now).await
    }

    pub(crate) async fn with(options: WorkerOptions, now: &str) -> Clocked {
        let clock = TestClock::at(time(now));
        let (sender, looks) = mpsc::unbounded_channel();
        let options = options.listen_os_shutdown_signals(false).use_notifications(false).cron_clock(&clock).on(
            CronTick,
            move |tick| {
                // The receiver is gone when the test is over.
                let _ = sender.send(tick.at);
                async {}
            },
        );
        let mut clocked = Clocked { started: Started::new(options).await, clock, looks };
        clocked.looked(time(now)).await;
        clocked
    }

    /// Waits until everything up to this time is done.
    pub(crate) async fn looked(&mut self, now: DateTime<Utc>) {
        while self.looks.recv().await.expect("the worker runs") != now {}
    }

    pub(crate) async fn set(&mut self, now: &str) {
        self.clock.set(time(now));
        self.looked(time(now)).await;
    }
}

/// Which ticks there are jobs of.
pub(crate) async fn ticks(db: &Db) -> Value {
    db.value(
        "select coalesce(json_agg(to_char(run_at at time zone 'UTC', 'HH24:MI:SS')
           || case when payload->'_cron'->>'backfilled' = 'true' then ' late' else '' end order by run_at, id), '[]')
         from graphile_worker._private_jobs",
    )
    .await
}

#[tokio::test]
async fn a_due_item_adds_its_job_with_all_its_options() {
    let db = Db::installed().await;
    let line = "0 8 * * * report ?id=daily&max=3&queue=q&priority=-5&jobKey=k%20%26&jobKeyMode=preserve_run_at {to: 'user@example.com', _cron: 1}";
    let mut clocked = Clocked::new(&db, line, "07:59:30").await;
    assert_eq!(ticks(&db).await, json!([]), "not before");
    clocked.set("08:00:00").await;
    let job = db
        .row(
            "select jobs.*, private.payload from (
               select id, task_identifier, queue_name, run_at, max_attempts, priority, key from graphile_worker.jobs
             ) as jobs join graphile_worker._private_jobs as private using (id)",
        )
        .await;
    assert_eq!(
        job,
        json!({
            "id": 1, "task_identifier": "report", "queue_name": "q", "run_at": "2026-03-10T08:00:00+00:00",
            "max_attempts": 3, "priority": -5, "key": "k &",
            "payload": {"to": "user@example.com", "_cron": {"ts": "2026-03-10T08:00:00.000Z", "backfilled": false}}
        })
    );
    assert_eq!(
        db.row("select * from graphile_worker._private_known_crontabs").await,
        json!({"identifier": "daily", "known_since": "2026-03-10T07:59:30+00:00", "last_execution": "2026-03-10T08:00:00+00:00"})
    );
    clocked.started.stop().await;
}

#[tokio::test]
async fn typed_items_and_their_text_add_the_same_jobs() -> Result<(), graphile_worker::Error> {
    let item = Cron::weekly_on::<SendDailyReport>(chrono::Weekday::Mon, 4, 30)?
        .id("weekly")
        .fill(CrontabFill::days(2))
        .fill_limit(3)
        .max_attempts(10)
        .queue("reports")
        .priority(7)
        .job_key("a & b")
        .job_key_mode(CrontabJobKeyMode::Replace)
        .tz(Tz::Europe__Paris)
        .payload(SendDailyReport { to: "user@example.com".to_owned() })?;
    let line = item.to_string();
    assert_eq!(
        line,
        "30 4 * * 1 send_daily_report ?id=weekly&fill=2d&fillLimit=3&max=10&queue=reports&priority=7&jobKey=a%20%26%20b\
         &jobKeyMode=replace&tz=Europe/Paris {\"to\":\"user@example.com\"}"
    );
    assert_eq!(parse_crontab(&line)?, [Crontab::from(item)]);

    let lines = [
        Cron::every_minute::<SendDailyReport>().to_string(),
        Cron::every_n_minutes::<SendDailyReport>(20)?.to_string(),
        Cron::hourly_at::<SendDailyReport>(5)?.to_string(),
        Cron::daily_at::<SendDailyReport>(8, 0)?.to_string(),
        Cron::monthly_on::<SendDailyReport>(31, 8, 0)?.to_string(),
        Cron::yearly_on::<SendDailyReport>(2, 29, 8, 0)?.to_string(),
        Cron::on_schedule::<SendDailyReport>("*/10 * 8-18/2 * * mon-fri".parse::<Schedule>()?).to_string(),
    ];
    assert_eq!(
        lines,
        [
            "* * * * * send_daily_report",
            "*/20 * * * * send_daily_report",
            "5 * * * * send_daily_report",
            "0 8 * * * send_daily_report",
            "0 8 31 * * send_daily_report",
            "0 8 29 2 * send_daily_report",
            "*/10 * 8,10,12,14,16,18 * * 1-5 send_daily_report",
        ]
    );
    Ok(())
}

#[tokio::test]
async fn invalid_items_are_rejected_with_an_explanation() {
    let refused = |result: Result<_, graphile_worker::Error>| result.err().unwrap().to_string();
    assert_eq!(refused(Cron::daily_at::<SendDailyReport>(24, 0).map(|_| ())), "the hour is 24, expected 0–23");
    assert_eq!(
        refused(WorkerOptions::default().with_cron("0 8 * * * a\n60 8 * * 8 b ?prioritty=1").map(|_| ())),
        "the crontab is invalid:\n\
         crontab line 2, column 1: minute is `60`, expected 0–59\n\
         \x20 60 8 * * 8 b ?prioritty=1\n\
         \x20 ^^\n\
         crontab line 2, column 10: day of the week is `8`, expected 0–7 or sun–sat\n\
         \x20 60 8 * * 8 b ?prioritty=1\n\
         \x20          ^\n\
         crontab line 2, column 15: unknown option `prioritty`, did you mean `priority`?\n\
         \x20 60 8 * * 8 b ?prioritty=1\n\
         \x20               ^^^^^^^^^"
    );
    // Nothing of this gets as far as the database.
    let init =
        async |options: WorkerOptions| options.database_url("postgres://nowhere.invalid/").init().await.map(|_| ());
    let daily = || Cron::every_minute::<SendDailyReport>();
    assert_eq!(
        refused(init(WorkerOptions::default().with_crons([daily(), daily()])).await),
        "two crontab items (tasks \"send_daily_report\" and \"send_daily_report\") have the same identifier \
         \"send_daily_report\": give one of them another with \
         `?id=…` or `.id(…)`"
    );
    assert_eq!(
        refused(init(WorkerOptions::default().with_cron(daily().queue("two words"))).await),
        "crontab item of the task `send_daily_report`: queue is `two words`, expected letters, digits, `_`, `-` or `:`"
    );
}

#[tokio::test]
async fn each_tick_is_added_once_however_many_workers_there_are() {
    let db = Db::installed().await;
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(Clocked::new(&db, "* * * * * every\n*/2 * * * * second", "08:00:30").await);
    }
    for minute in 1..=5 {
        let now = format!("08:0{minute}:00");
        // All at once, and one of them a little late.
        for worker in &workers {
            worker.clock.set(time(&now));
        }
        for worker in &mut workers {
            worker.looked(time(&now)).await;
        }
    }
    let counts = db
        .value(
            "select json_object_agg(run_at::text || ' ' || task_identifier, n) from (
               select to_char(run_at at time zone 'UTC', 'MI') as run_at, task_identifier, count(*) as n
               from graphile_worker.jobs group by 1, 2) as counted",
        )
        .await;
    assert_eq!(
        counts,
        json!({"01 every": 1, "02 every": 1, "03 every": 1, "04 every": 1, "05 every": 1, "02 second": 1, "04 second": 1})
    );
    for worker in workers {
        worker.started.stop().await;
    }
}

#[tokio::test]
async fn runs_missed_while_no_worker_ran_are_added_as_far_back_as_fill_reaches() {
    let db = Db::installed().await;
    db.run(
        "insert into graphile_worker._private_known_crontabs values
           ('all', '2026-01-01Z', '2026-03-10T05:00:00Z'), ('newest', '2026-01-01Z', '2026-03-10T05:00:00Z'),
           ('short', '2026-01-01Z', '2026-03-10T05:00:00Z'), ('none', '2026-01-01Z', '2026-03-10T05:00:00Z'),
           ('never_ran', '2026-03-10T07:00:00Z', null)",
    )
    .await;
    let crontab = "0 * * * * all ?fill=1d\n0 * * * * newest ?fill=1d&fillLimit=1\n0 * * * * short ?fill=90m\n\
                   0 * * * * none\n0 * * * * never_ran ?fill=1d\n0 * * * * new ?fill=1d";
    let mut clocked = Clocked::new(&db, crontab, "08:30:00").await;
    let missed = "select json_object_agg(task_identifier, times) from (
        select task_identifier, json_agg(to_char(run_at at time zone 'UTC', 'HH24:MI') order by run_at) as times
        from graphile_worker.jobs group by 1) as tasks";
    assert_eq!(
        db.value(missed).await,
        json!({
            "all": ["06:00", "07:00", "08:00"], "newest": ["08:00"], "short": ["07:00", "08:00"],
            "never_ran": ["07:00", "08:00"]
        })
    );
    assert_eq!(
        db.value("select bool_and((payload->'_cron'->>'backfilled')::bool) from graphile_worker._private_jobs").await,
        true
    );
    db.run("delete from graphile_worker._private_jobs").await;
    clocked.set("09:00:00").await;
    assert_eq!(ticks(&db).await, json!(["09:00:00", "09:00:00", "09:00:00", "09:00:00", "09:00:00", "09:00:00"]));
    clocked.started.stop().await;

    db.run("delete from graphile_worker._private_jobs").await;
    let again = Clocked::new(&db, crontab, "09:10:00").await;
    assert_eq!(ticks(&db).await, json!([]), "nothing was missed");
    again.started.stop().await;
}

#[tokio::test]
async fn many_missed_ticks_are_added_in_order() {
    let db = Db::installed().await;
    db.run(
        "insert into graphile_worker._private_known_crontabs values
           ('a', '2026-01-01Z', '2026-03-09T08:00:00Z'), ('b', '2026-01-01Z', '2026-03-09T08:00:00Z')",
    )
    .await;
    let clocked = Clocked::new(&db, "* * * * * a ?fill=1d\n* * * * * b ?fill=1d", "08:00:00").await;
    let jobs = "select json_build_array(count(*), count(distinct (run_at, task_id)), min(run_at), max(run_at),
        bool_and(in_order)) from (
          select *, row_number() over (order by id) = row_number() over (order by run_at, task_id) as in_order
          from graphile_worker._private_jobs) as jobs";
    assert_eq!(
        db.value(jobs).await,
        json!([2880, 2880, "2026-03-09T08:01:00+00:00", "2026-03-10T08:00:00+00:00", true])
    );
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_clock_that_jumps_a_few_minutes_loses_and_repeats_no_tick() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "* * * * * t\n0 * * * * filled ?fill=100m", "08:00:30").await;
    clocked.set("08:03:20").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00", "08:02:00", "08:03:00"]), "a tick that took long");
    // As if the machine had slept.
    clocked.set("10:30:30").await;
    let after_sleep = json!([
        "08:01:00",
        "08:02:00",
        "08:03:00",
        "09:00:00 late",
        "10:00:00 late",
        "10:26:00",
        "10:27:00",
        "10:28:00",
        "10:29:00",
        "10:30:00"
    ]);
    assert_eq!(ticks(&db).await, after_sleep);
    clocked.set("09:15:00").await;
    clocked.set("10:30:59").await;
    assert_eq!(ticks(&db).await, after_sleep, "put back and on again");
    db.run("delete from graphile_worker._private_jobs").await;
    clocked.set("10:31:00").await;
    assert_eq!(ticks(&db).await, json!(["10:31:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn items_fire_at_the_right_second_and_in_their_time_zone() {
    let db = Db::installed().await;
    let crontab = "*/20 * * * * * often\n30 9 * * * paris ?tz=Europe/Paris";
    let mut clocked = Clocked::new(&db, crontab, "08:29:10").await;
    for now in ["08:29:20", "08:29:40", "08:30:00"] {
        clocked.set(now).await;
    }
    assert_eq!(ticks(&db).await, json!(["08:29:20", "08:29:40", "08:30:00", "08:30:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_thousand_items_due_at_once_are_all_added() {
    let db = Db::installed().await;
    let crontab: String = (0..1000).map(|n| format!("0 9 * * * task_{n} ?queue=q{}\n", n % 7)).collect();
    let mut workers =
        vec![Clocked::new(&db, &crontab, "08:00:00").await, Clocked::new(&db, &crontab, "08:00:00").await];
    for worker in &workers {
        worker.clock.set(time("09:00:00"));
    }
    for worker in &mut workers {
        worker.looked(time("09:00:00")).await;
    }
    let jobs = "select json_build_array(count(*), count(distinct task_id)) from graphile_worker._private_jobs";
    assert_eq!(db.value(jobs).await, json!([1000, 1000]));
    for worker in workers {
        worker.started.stop().await;
    }
}

#[tokio::test]
async fn hooks_observe_recurring_jobs_and_can_change_or_reject_them() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._private_known_crontabs values ('old', '2026-01-01Z', '2026-03-10T06:00:00Z')")
        .await;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (scheduled, backfilled) = (heard.clone(), heard.clone());
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .with_cron("0 * * * * old ?fill=1d\n0 * * * * refused\n0 * * * * impossible\n0 * * * * new")
        .unwrap()
        .on(BeforeJobSchedule, |mut job| async move {
            match job.identifier.as_str() {
                "refused" => return JobScheduleResult::Refuse("not today".to_owned()),
                "impossible" => job.spec.max_attempts = Some(0),
                _ => job.spec.priority = Some(4),
            }
            JobScheduleResult::Add(job)
        })
        .on(CronJobScheduled, move |ctx| {
            scheduled.lock().unwrap().push(format!("{} {}", ctx.crontab.identifier(), ctx.at.format("%H:%M")));
            async {}
        })
        .on(CronJobBackfilled, move |ctx| {
            backfilled.lock().unwrap().push(format!("{} {} late", ctx.crontab.identifier(), ctx.at.format("%H:%M")));
            async {}
        });
    let mut clocked = Clocked::with(options, "07:30:00").await;
    clocked.set("08:00:00").await;
    assert_eq!(*heard.lock().unwrap(), ["old 07:00 late", "old 08:00", "new 08:00"]);
    assert_eq!(
        db.value("select json_agg(json_build_array(task_identifier, priority) order by id) from graphile_worker.jobs")
            .await,
        json!([["old", 4], ["old", 4], ["new", 4]]),
        "one that the database does not take keeps no other from being added"
    );
    clocked.started.stop().await;
}

#[tokio::test]
async fn recurring_jobs_work_at_every_default_isolation_level() {
    for level in ["repeatable read", "serializable"] {
        let db = Db::installed().await;
        let name = db.value("select quote_ident(current_database())").await;
        let name = name.as_str().unwrap();
        db.run(&format!("alter database {name} set default_transaction_isolation = '{level}'")).await;
        let mut workers = Vec::new();
        for _ in 0..3 {
            let options = WorkerOptions::default().database_url(db.url());
            let crontab = "* * * * * a\n*/2 * * * * b ?queue=q\n* * * * * c ?jobKey=k";
            workers.push(Clocked::with(options.with_cron(crontab).unwrap(), "08:00:30").await);
        }
        for minute in 1..=6 {
            let now = format!("08:0{minute}:00");
            for worker in &workers {
                worker.clock.set(time(&now));
            }
            for worker in &mut workers {
                worker.looked(time(&now)).await;
            }
        }
        let counts = "select json_object_agg(task_identifier, n) from (
            select task_identifier, count(*) as n from graphile_worker.jobs group by 1) as counted";
        assert_eq!(db.value(counts).await, json!({"a": 6, "b": 3, "c": 1}), "{level}");
        for worker in workers {
            worker.started.stop().await;
        }
    }
}

#[tokio::test]
async fn a_late_worker_locks_items_in_the_order_of_the_crontab() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "*/2 * * * * second\n* * * * * every", "08:00:30").await;
    let mut other = db.pool.begin().await.unwrap();
    let lock = "select 1 from graphile_worker._private_known_crontabs where identifier = $1 for update nowait";
    sqlx::query(lock).bind("second").execute(&mut *other).await.unwrap();
    // What it comes to first is a tick of the item that is second.
    clocked.clock.set(time("08:02:30"));
    let waits = "select exists (select from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock')";
    while db.value(waits).await != true {}
    sqlx::query(lock).bind("every").execute(&mut *other).await.expect("the item is not locked");
    other.rollback().await.unwrap();
    clocked.looked(time("08:02:30")).await;
    assert_eq!(ticks(&db).await, json!(["08:01:00", "08:02:00", "08:02:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn an_item_whose_row_is_locked_delays_no_other_item() {
    let db = Db::installed().await;
    db.add_job("'keyed', job_key := 'k', run_at := now() + interval '1 day'").await;
    let mut clocked = Clocked::new(&db, "* * * * * keyed ?jobKey=k\n* * * * * free", "08:00:30").await;
    let mut other = db.pool.begin().await.unwrap();
    sqlx::raw_sql("select from graphile_worker._private_jobs where key = 'k' for update")
        .execute(&mut *other)
        .await
        .unwrap();
    clocked.set("08:01:00").await;
    let free = "select count(*) from graphile_worker.jobs where task_identifier = 'free'";
    assert_eq!(db.value(free).await, 1);
    other.rollback().await.unwrap();
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_tick_is_retried_until_a_missing_table_is_back() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "* * * * * t", "08:00:30").await;
    db.run("alter table graphile_worker._private_known_crontabs rename to elsewhere").await;
    clocked.clock.set(time("08:01:00"));
    // It has tried, and connects again.
    let connected = "select max(backend_start)::text from pg_stat_activity where datname = current_database()
        and application_name like '% cron'";
    let first = db.value(connected).await;
    while db.value(connected).await == first {}
    db.run("alter table graphile_worker.elsewhere rename to _private_known_crontabs").await;
    clocked.looked(time("08:01:00")).await;
    assert_eq!(ticks(&db).await, json!(["08:01:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_new_worker_does_not_overtake_a_tick_that_an_older_worker_retries() {
    let db = Db::installed().await;
    let role = format!("cut_off_{}", std::process::id());
    db.run(&format!("create role {role} login superuser")).await;
    let pool = sqlx::PgPool::connect_with(db.options().username(&role)).await.unwrap();
    let options = WorkerOptions::default().pg_pool(pool.clone()).with_cron("* * * * * t").unwrap();
    let mut older = Clocked::with(options, "08:00:30").await;
    // An outage for the older worker: its scheduler loses its connection and cannot connect.
    db.run(&format!("alter role {role} nologin")).await;
    db.run(
        "select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and application_name like '% cron'",
    )
    .await;
    older.clock.set(time("08:01:00"));

    let mut new = Clocked::new(&db, "* * * * * t", "08:01:30").await;
    new.set("08:02:00").await;
    assert_eq!(ticks(&db).await, json!([]), "the new worker waits for the retry of 08:01");
    db.run(&format!("alter role {role} login")).await;
    older.looked(time("08:01:00")).await;
    while ticks(&db).await != json!(["08:01:00", "08:02:00"]) {
        assert_ne!(ticks(&db).await, json!(["08:02:00"]), "08:01 is lost");
    }
    new.set("08:03:00").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00", "08:02:00", "08:03:00"]));
    older.started.stop().await;
    new.started.stop().await;
    pool.close().await;
    db.run(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn a_tick_that_no_worker_retries_only_delays_the_next_one() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._private_known_crontabs values ('t', '2026-01-01Z', '2026-03-10T08:00:00Z')")
        .await;
    let mut clocked = Clocked::new(&db, "* * * * * t\n* * * * * other", "08:01:30").await;
    clocked.set("08:02:00").await;
    let other = "select array_agg(task_identifier) = '{other}' from graphile_worker.jobs";
    assert_eq!(db.value(other).await, true, "other items do not wait");
    while ticks(&db).await != json!(["08:02:00", "08:02:00"]) {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    clocked.set("08:03:00").await;
    assert_eq!(ticks(&db).await, json!(["08:02:00", "08:02:00", "08:03:00", "08:03:00"]), "08:01 is not invented");
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_tick_that_is_late_because_of_slow_work_is_not_missed() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._private_known_crontabs values ('old', '2026-01-01Z', '2026-03-10T04:00:00Z')")
        .await;
    let clock = TestClock::at(time("07:30:30"));
    let (sender, mut looks) = mpsc::unbounded_channel();
    let slow = clock.clone();
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .with_cron("0 * * * * old ?fill=1d\n* * * * * other")
        .unwrap()
        .listen_os_shutdown_signals(false)
        .use_notifications(false)
        .cron_clock(&clock)
        // A slow hook.
        .on(CronJobBackfilled, move |_| {
            slow.set(slow.now() + TimeDelta::minutes(1) + TimeDelta::seconds(20));
            async {}
        })
        .on(CronTick, move |tick| {
            let _ = sender.send(tick.at);
            async {}
        });
    let started = Started::new(options).await;
    while looks.recv().await.unwrap() < time("07:34:30") {}
    assert_eq!(
        ticks(&db).await,
        json!(["05:00:00 late", "06:00:00 late", "07:00:00 late", "07:31:00", "07:32:00", "07:33:00", "07:34:00"])
    );
    started.stop().await;
}

#[tokio::test]
async fn a_worker_can_stop_while_it_adds_many_missed_ticks() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._private_known_crontabs values ('old', '2026-01-01Z', '2026-03-01T06:00:00Z')")
        .await;
    let (sender, mut added) = mpsc::unbounded_channel();
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .with_cron("* * * * * * old ?fill=10w")
        .unwrap()
        .listen_os_shutdown_signals(false)
        .cron_clock(&TestClock::at(time("08:00:00")))
        .on(CronJobBackfilled, move |_| {
            let _ = sender.send(());
            async {}
        });
    let started = Started::new(options).await;
    added.recv().await.unwrap();
    started.stop().await;
    let left_out = "select count(*) < 100000 from graphile_worker._private_jobs";
    assert_eq!(db.value(left_out).await, true, "of 784,800");
}

#[tokio::test]
async fn an_item_that_is_paused_for_ever_delays_no_other_item() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._private_known_crontabs values ('paused', '2026-01-01Z', 'infinity')").await;
    let clocked = Clocked::new(&db, "* * * * * paused\n* * * * * good", "08:01:00").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn an_item_can_be_reset_after_a_clock_was_wrong() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "* * * * * t", "08:00:30").await;
    clocked.set("20:00:00").await;
    clocked.set("08:01:00").await;
    db.run("delete from graphile_worker._private_known_crontabs; delete from graphile_worker._private_jobs").await;
    clocked.set("08:02:00").await;
    clocked.set("08:03:00").await;
    assert_eq!(ticks(&db).await, json!(["08:02:00", "08:03:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn comparing_items_delays_no_tick() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "* * * * * t", "08:00:30").await;
    let mut other = db.pool.begin().await.unwrap();
    sqlx::raw_sql("lock table graphile_worker._rs_crontab_items").execute(&mut *other).await.unwrap();
    clocked.set("08:01:00").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00"]));
    other.rollback().await.unwrap();
    clocked.started.stop().await;
}

#[tokio::test]
async fn a_role_without_rights_on_the_items_stops_retrying() {
    let db = Db::installed().await;
    let role = format!("limited_{}", std::process::id());
    db.run(&format!(
        "create role {role} login;
         grant usage on schema graphile_worker to {role};
         grant select, insert, update, delete on all tables in schema graphile_worker to {role};
         create policy jobs on graphile_worker._private_jobs for all to {role} using (true);
         create policy tasks on graphile_worker._private_tasks for all to {role} using (true);
         create policy queues on graphile_worker._private_job_queues for all to {role} using (true);
         create policy see on graphile_worker._private_known_crontabs for select to {role} using (true);
         create policy new on graphile_worker._private_known_crontabs for insert to {role} with check (true)"
    ))
    .await;
    let pool = sqlx::PgPool::connect_with(db.options().username(&role)).await.unwrap();
    let options = WorkerOptions::default().pg_pool(pool.clone()).with_cron("* * * * * t").unwrap();
    let mut clocked = Clocked::with(options, "08:00:30").await;
    clocked.set("08:01:00").await;
    assert_eq!(ticks(&db).await, json!([]));
    clocked.started.stop().await;
    pool.close().await;
    db.run(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn a_hook_that_panics_does_not_stop_recurring_jobs() {
    let db = Db::installed().await;
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .with_cron("* * * * * bad\n* * * * * good")
        .unwrap()
        .on(BeforeJobSchedule, |job| async move {
            assert_ne!(job.identifier, "bad");
            JobScheduleResult::Add(job)
        })
        .on(CronJobScheduled, |_| async { panic!("every time") });
    let mut clocked = Clocked::with(options, "08:00:30").await;
    clocked.set("08:01:00").await;
    clocked.set("08:02:00").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00", "08:02:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn an_item_whose_row_was_deleted_continues() {
    let db = Db::installed().await;
    let mut clocked = Clocked::new(&db, "* * * * * t", "08:00:30").await;
    clocked.set("08:01:00").await;
    db.run("delete from graphile_worker._private_known_crontabs").await;
    clocked.set("08:02:00").await;
    assert_eq!(ticks(&db).await, json!(["08:01:00", "08:02:00"]));
    clocked.started.stop().await;
}

#[tokio::test]
async fn by_default_items_fire_by_the_databases_clock() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .with_cron("* * * * * * tick")
        .unwrap()
        .define_task("tick", move |payload: Value, _| {
            let _ = sender.send(payload);
            async {}
        });
    let started = Started::new(options).await;
    let mut times = Vec::new();
    for _ in 0..2 {
        let payload = ran.recv().await.unwrap();
        assert_eq!(payload["_cron"]["backfilled"], json!(false));
        times.push(payload["_cron"]["ts"].as_str().unwrap().parse::<DateTime<Utc>>().unwrap());
    }
    assert_eq!(times[1] - times[0], TimeDelta::seconds(1));
    started.stop().await;
}

#[tokio::test]
async fn workers_warn_if_they_have_different_items_under_one_identifier() {
    let db = Db::installed().await;
    let (log, _logging) = Log::start();
    let mut one = Clocked::new(&db, "* * * * * t ?id=same\n* * * * * agreed", "08:00:30").await;
    let mut other = Clocked::new(&db, "*/5 * * * * u ?id=same\n* * * * * agreed", "08:00:30").await;
    for minute in 1..=6 {
        for worker in [&mut one, &mut other] {
            worker.set(&format!("08:0{minute}:00")).await;
        }
    }
    let text = log.text();
    let complaints: Vec<&str> = text.lines().filter(|line| line.contains("another worker has a different")).collect();
    assert_eq!(complaints.len(), 2, "each once: {text}");
    assert!(complaints.iter().all(|line| line.contains("identifier=\"same\"") && line.contains("?id=")), "{text}");
    // Either worker may be the first.
    for (ours, theirs) in [("* * * * * t", "*/5 * * * * u"), ("*/5 * * * * u", "* * * * * t")] {
        let complaint = format!("ours=\"{ours}\" theirs=\"{theirs}\"");
        assert!(complaints.iter().any(|line| line.contains(&complaint)), "{text}");
    }
    one.started.stop().await;
    other.started.stop().await;
}
