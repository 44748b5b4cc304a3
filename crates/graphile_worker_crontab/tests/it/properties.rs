//! What holds for any item and any text.

use chrono::{DateTime, Duration, LocalResult, NaiveDateTime, Offset, TimeZone, Timelike, Utc};
use graphile_worker_crontab::{Crontab, CrontabFill, CrontabJobKeyMode, CrontabOptions, Schedule, Tz, parse_crontab};
use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;
use serde_json::{Map, Value};

fn field(min: u32, max: u32) -> impl Strategy<Value = String> {
    let list = vec(min..=max, 1..6).prop_map(|values| values.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
    let range = (min..max).prop_flat_map(move |start| (Just(start), start + 1..=max, of(1..=max))).prop_map(
        |(start, end, step)| format!("{start}-{end}{}", step.map_or(String::new(), |step| format!("/{step}"))),
    );
    prop_oneof![3 => Just("*".to_owned()), 2 => (1..=max).prop_map(|step| format!("*/{step}")), 3 => list, 2 => range]
}

fn five_fields() -> impl Strategy<Value = String> {
    (field(0, 59), field(0, 23), field(1, 31), field(1, 12), field(0, 7))
        .prop_map(|(minute, hour, day, month, weekday)| format!("{minute} {hour} {day} {month} {weekday}"))
}

fn schedules() -> impl Strategy<Value = Schedule> {
    (of(field(0, 59)), five_fields()).prop_map(|(seconds, fields)| {
        let text = seconds.map_or(fields.clone(), |seconds| format!("{seconds} {fields}"));
        text.parse().unwrap()
    })
}

fn zones() -> impl Strategy<Value = Tz> {
    (0..chrono_tz::TZ_VARIANTS.len()).prop_map(|nth| chrono_tz::TZ_VARIANTS[nth])
}

/// Whole floats are left out: they are read as integers.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("whole", |float| float.fract() != 0.0).prop_map(Value::from),
        texts().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(texts(), inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn texts() -> impl Strategy<Value = String> {
    let odd = prop::sample::select(vec![
        '&', '%', '+', '=', '?', '"', '\'', '\\', '{', '}', '/', '#', ' ', '\n', '\u{2028}', '\u{a0}', '🐘',
    ]);
    let character =
        prop_oneof![2 => any::<char>().prop_filter("NUL", |c| *c != '\0'), 1 => odd, 1 => prop::char::range(' ', '~')];
    vec(character, 0..12).prop_map(|characters| characters.into_iter().collect())
}

prop_compose! {
    fn options()(
        id in of("[_a-zA-Z][-_a-zA-Z0-9]{0,8}"),
        fill in of(any::<[u32; 5]>()),
        fill_limit in of(1..=u32::MAX),
        max_attempts in of(1..=i16::MAX),
        queue in of("[-a-zA-Z0-9_:]{1,8}"),
        priority in of(any::<i16>()),
        job_key in of(texts()),
        job_key_mode in of(prop::sample::select(vec![CrontabJobKeyMode::Replace, CrontabJobKeyMode::PreserveRunAt])),
        tz in of(zones()),
    ) -> CrontabOptions {
        let fill = fill.map(|[w, d, h, m, s]| CrontabFill { w, d, h, m, s });
        CrontabOptions { id, fill, fill_limit, max_attempts, queue, priority, job_key, job_key_mode, tz }
    }
}

prop_compose! {
    fn items()(
        schedule in schedules(),
        task in "[_a-zA-Z][_a-zA-Z0-9:/-]{0,12}",
        options in options(),
        payload in of(btree_map(texts(), values(), 0..4)),
    ) -> Crontab {
        let payload = payload.map(|map| map.into_iter().collect::<Map<String, Value>>());
        Crontab { options, payload, ..Crontab::new(schedule, task) }
    }
}

/// A line with a few characters changed, left out or doubled.
fn nearly_lines() -> impl Strategy<Value = String> {
    (items(), vec((any::<prop::sample::Index>(), 0..4, any::<char>()), 0..5)).prop_map(|(item, changes)| {
        let mut line: Vec<char> = item.to_string().chars().collect();
        for (index, change, character) in changes {
            let at = index.index(line.len());
            match change {
                0 => line[at] = character,
                1 => line.insert(at, line[at]),
                2 => line.insert(at, character),
                _ => drop(line.remove(at)),
            }
            if line.is_empty() {
                break;
            }
        }
        line.into_iter().collect()
    })
}

/// Whether an item fires in a minute, found without any search: each local time that this minute ends is asked.
fn fires_in_minute(schedule: &Crontab, zone: Tz, minute: DateTime<Utc>) -> bool {
    let local = |instant: DateTime<Utc>| {
        let offset = zone.offset_from_utc_datetime(&instant.naive_utc()).fix();
        instant.naive_utc() + Duration::seconds(offset.local_minus_utc().into())
    };
    // The same fields by UTC.
    let fields = Crontab::new(schedule.schedule, "task");
    let named = |time: NaiveDateTime| fields.matches(time.and_utc());
    let here = local(minute);
    let before = local(minute - Duration::minutes(1)) + Duration::minutes(1);
    let every_hour = schedule.schedule.to_string().split(' ').nth(1) == Some("*");
    let second_pass = match zone.from_local_datetime(&here) {
        LocalResult::Ambiguous(_, second) => second.naive_utc() == minute.naive_utc(),
        _ => false,
    };
    let mut skipped = before;
    while skipped < here {
        if named(skipped) {
            return true;
        }
        skipped += Duration::minutes(1);
    }
    named(here) && (every_hour || !second_pass)
}

/// A moment within a day of a change of the zone's clock, if it has any, in the years in which clocks show whole minutes.
fn near_a_change(zone: Tz, seed: u32) -> DateTime<Utc> {
    let start = Utc.with_ymd_and_hms(1975, 1, 1, 0, 0, 0).unwrap() + Duration::hours(i64::from(seed % (60 * 365 * 24)));
    let offset = |at: DateTime<Utc>| zone.offset_from_utc_datetime(&at.naive_utc()).fix().local_minus_utc();
    let changed = (0..400).find(|day| offset(start + Duration::days(*day)) != offset(start + Duration::days(day + 1)));
    start + Duration::days(changed.unwrap_or(0)) - Duration::hours(i64::from(seed % 24))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_valid_item_prints_as_a_line_with_the_same_meaning(item in items()) {
        match item.check() {
            Ok(()) => {
                let line = item.to_string();
                prop_assert_eq!(line.parse::<Crontab>().map_err(|error| error.to_string()), Ok(item));
            }
            // The generator makes keys and limits that are refused; nothing else.
            Err(error) => for problem in &error.problems {
                prop_assert!(problem.starts_with("jobKey ") || problem.contains("fillLimit"), "{}", problem);
            }
        }
    }

    #[test]
    fn fields_print_as_fields_with_the_same_meaning(schedule in schedules()) {
        prop_assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }

    #[test]
    fn any_text_is_parsed_or_rejected(text in any::<String>()) {
        if let Err(error) = parse_crontab(&text) {
            prop_assert!(!error.to_string().is_empty());
        }
        let _ = text.parse::<Schedule>();
    }

    #[test]
    fn any_words_are_parsed_or_rejected(words in vec(prop_oneof![Just("*".to_owned()), Just("mon".to_owned()), "[0-9*/,-]{1,5}", "[?{@#].{0,8}", "\\PC{0,6}"], 0..10)) {
        if let Err(error) = parse_crontab(&words.join(" ")) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn any_almost_valid_line_is_parsed_or_rejected(line in nearly_lines()) {
        match parse_crontab(&line) {
            Ok(items) => for item in items {
                prop_assert_eq!(item.check(), Ok(()));
                prop_assert_eq!(item.to_string().parse::<Crontab>().map_err(|error| error.to_string()), Ok(item));
            },
            Err(error) => prop_assert!(!error.errors.is_empty() && !error.to_string().is_empty()),
        }
    }
}

proptest! {
    // Each looks at two weeks of minutes.
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fire_times_are_those_found_minute_by_minute(fields in five_fields(), zone in zones(), seed in any::<u32>()) {
        let mut item = Crontab::new(fields.parse().unwrap(), "task");
        item.options.tz = Some(zone);
        let from = near_a_change(zone, seed).with_second(0).unwrap();
        let to = from + Duration::days(14);
        let minutes = (0..14 * 24 * 60).map(|minute| from + Duration::minutes(minute));
        let expected: Vec<DateTime<Utc>> = minutes.filter(|minute| fires_in_minute(&item, zone, *minute)).collect();
        let found: Vec<DateTime<Utc>> =
            item.fire_times(from - Duration::seconds(1)).take_while(|fired| *fired < to).collect();
        prop_assert_eq!(&found, &expected, "{} from {}", item, from);

        let mut back: Vec<DateTime<Utc>> = item.fire_times_before(to).take_while(|fired| *fired >= from).collect();
        back.reverse();
        prop_assert_eq!(&back, &expected, "{} back from {}", item, to);
        for minute in found.iter().take(100) {
            prop_assert!(item.matches(*minute + Duration::seconds(59)));
        }
    }

    #[test]
    fn previous_mirrors_next_with_seconds_in_any_zone_and_age(schedule in schedules(), zone in zones(), seconds in -6_000_000_000_i64..10_000_000_000) {
        let mut item = Crontab::new(schedule, "task");
        item.options.tz = Some(zone);
        let start = DateTime::from_timestamp(seconds, 0).unwrap();
        let forth: Vec<DateTime<Utc>> = item.fire_times(start).take(200).collect();
        prop_assert!(forth.windows(2).all(|pair| pair[0] < pair[1]));
        if let Some(last) = forth.last() {
            let end = *last + Duration::seconds(1);
            let mut back: Vec<DateTime<Utc>> = item.fire_times_before(end).take_while(|fired| *fired > start).collect();
            back.reverse();
            prop_assert_eq!(back, forth, "{} from {}", item, start);
        }
    }
}
