//! Our reading of crontabs beside that of Node's parser: thousands of lines, right, nearly right and odd, must be
//! accepted or refused alike, and mean the same; but for what we document to refuse or to add.

#![allow(missing_docs)]

use chrono::{DateTime, Duration, TimeZone, Utc};
use graphile_worker_crontab::{Crontab, CrontabJobKeyMode, Schedule, parse_crontab};
use graphile_worker_interop::node_reads_crontabs;
use serde_json::{Value, json};

const PACKAGE: &str = "graphile-worker";
/// A leap year.
const YEAR: i32 = 2028;

#[test]
fn crontabs_mean_what_they_mean_to_node() {
    let mut lot = Lot(0x9e37_79b9_7f4a_7c15);
    let texts: Vec<String> = (0..6000).map(|_| lot.crontab()).collect();
    let questions: Vec<Value> = texts.iter().map(|text| json!({"text": text})).collect();
    let answers = node_reads_crontabs(PACKAGE, &Value::Array(questions));
    let mut tally = [0; 4];
    for (text, answer) in texts.iter().zip(&answers) {
        let nodes = answer["items"].as_array();
        let case = match (parse_crontab(text), nodes) {
            (Ok(ours), Some(nodes)) => {
                assert_eq!(ours.len(), nodes.len(), "{text:?}");
                ours.iter().zip(nodes).for_each(|(item, node)| assert_same(item, node, text));
                0
            }
            (Err(_), None) => 1,
            (Err(error), Some(nodes)) => {
                assert!(
                    nodes.iter().any(refused_on_purpose) || is_unwritable(text),
                    "only we refuse {text:?}\n{error}"
                );
                2
            }
            (Ok(ours), None) => {
                assert!(is_ours_alone(text, &ours), "only Node refuses {text:?}");
                3
            }
        };
        tally[case] += 1;
    }
    println!(
        "both accept {}, both refuse {}, only we refuse {}, only Node refuses {}",
        tally[0], tally[1], tally[2], tally[3]
    );
    assert!(tally[0] > 2000 && tally[1] > 1000 && tally[2] > 50, "the texts are a good mixture: {tally:?}");
}

#[test]
fn schedules_fire_in_the_minutes_of_a_year_in_which_they_fire_for_node() {
    let mut lot = Lot(0x2545_f491_4f6c_dd1d);
    let texts: Vec<String> = (0..250).map(|_| format!("{} task", lot.right_fields())).collect();
    let questions: Vec<Value> = texts.iter().map(|text| json!({"text": text, "year": YEAR})).collect();
    let answers = node_reads_crontabs(PACKAGE, &Value::Array(questions));
    let start = Utc.with_ymd_and_hms(YEAR, 1, 1, 0, 0, 0).unwrap();
    let end = Utc.with_ymd_and_hms(YEAR + 1, 1, 1, 0, 0, 0).unwrap();
    for (text, answer) in texts.iter().zip(&answers) {
        let item: Crontab = text.parse().expect("a right line");
        let fired: Vec<DateTime<Utc>> =
            item.fire_times(start - Duration::seconds(1)).take_while(|at| *at < end).collect();
        let digest = fired
            .iter()
            .fold(0_u32, |digest, at| digest.wrapping_mul(31).wrapping_add((*at - start).num_minutes() as u32));
        assert_eq!(answer["firings"], json!({"count": fired.len(), "digest": digest}), "{text}");
    }
}

fn assert_same(ours: &Crontab, node: &Value, text: &str) {
    let field = |name: &str| {
        let values = node["fields"][name].as_array().expect("an array");
        values.iter().map(Value::to_string).collect::<Vec<_>>().join(",")
    };
    let fields = ["minutes", "hours", "dates", "months", "dows"].map(field).join(" ");
    assert_eq!(Ok(ours.schedule), fields.parse::<Schedule>(), "schedule of {text:?}");
    assert_eq!(node["task"], json!(ours.task_identifier), "task of {text:?}");
    assert_eq!(node["identifier"], json!(ours.identifier()), "identifier of {text:?}");

    let options = &ours.options;
    let fill = options.fill.map_or(0, |fill| fill.as_duration().num_milliseconds());
    let mode = match options.job_key_mode {
        Some(CrontabJobKeyMode::PreserveRunAt) => Some("preserve_run_at"),
        Some(CrontabJobKeyMode::Replace) => Some("replace"),
        // Node fills in the default; ours leaves that to the statement that adds the job.
        None => options.job_key.as_ref().map(|_| "replace"),
    };
    for (name, value) in [
        ("backfillPeriod", json!(fill)),
        ("maxAttempts", json!(options.max_attempts)),
        ("queueName", json!(options.queue)),
        ("priority", json!(options.priority)),
        ("jobKey", json!(options.job_key)),
        ("jobKeyMode", json!(mode)),
    ] {
        assert_eq!(node["options"][name], value, "{name} of {text:?}");
    }

    let nodes: Value = payload(node).expect("a payload");
    let ours = ours.payload.clone().map_or(Value::Null, Value::Object);
    assert!(are_equal(&ours, &nodes), "payload of {text:?}: {ours} and {nodes}");
}

fn payload(node: &Value) -> Option<Value> {
    serde_json::from_str(node["payload"].as_str()?).ok()
}

/// Numbers are equal if they are the same double, which is all that JavaScript has; but serde_json reads Node's answer
/// to within the last bit.
fn are_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => match (one.as_f64(), other.as_f64()) {
            (Some(one), Some(other)) => one == other || (one - other).abs() <= one.abs() * f64::EPSILON,
            _ => false,
        },
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| are_equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|other| are_equal(value, other)))
        }
        _ => one == other,
    }
}

/// What the crate documents to refuse: jobs that the database would not take.
fn refused_on_purpose(node: &Value) -> bool {
    let options = &node["options"];
    let length = |value: &Value| value.as_str().map_or(0, |text| text.chars().count());
    // What is not finite is null in JSON.
    let outside = |name: &str, low: f64, high: f64| {
        options.get(name).is_some_and(|value| !value.as_f64().is_some_and(|number| number >= low && number <= high))
    };
    outside("maxAttempts", 1.0, 32767.0)
        || outside("priority", -32768.0, 32767.0)
        || outside("backfillPeriod", 0.0, f64::from(u32::MAX) * 1000.0)
        || length(&node["task"]) > 128
        || length(&options["queueName"]) > 128
        || options["jobKey"].as_str().is_some_and(|key| key.is_empty() || key.contains('\0'))
        || length(&options["jobKey"]) > 512
        || payload(node).is_none_or(|payload| depth(&payload) > 100)
}

/// The same of texts in a payload, which Node's answer does not show where a later member takes the place of the first.
fn is_unwritable(text: &str) -> bool {
    [r"\ud", r"\u0000", r"\0"].iter().any(|escape| text.contains(escape))
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(object) => 1 + object.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// What the crate documents to add: seconds, names, shorthands, steps of ranges, and two options.
fn is_ours_alone(text: &str, items: &[Crontab]) -> bool {
    let has_letters_or_stepped_ranges = |word: &str| {
        let stepped_range = word.split(',').any(|part| part.contains('-') && part.contains('/'));
        stepped_range || word.contains(|c: char| c.is_ascii_alphabetic() || c == '@')
    };
    items
        .iter()
        .any(|item| item.schedule.has_seconds() || item.options.tz.is_some() || item.options.fill_limit.is_some())
        || text.lines().any(|line| line.split_whitespace().take(5).any(has_letters_or_stepped_ranges))
}

/// The same texts each time.
struct Lot(u64);

impl Lot {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    /// True once in `times`.
    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn one_of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }

    fn crontab(&mut self) -> String {
        match self.below(12) {
            0 => {
                let lines: Vec<String> = (0..=self.below(4)).map(|_| self.file_line()).collect();
                lines.join(self.one_of(&["\n", "\r\n", "\n\n", "\r\r\n"]))
            }
            1..4 => self.changed_line(),
            _ => self.line(),
        }
    }

    fn file_line(&mut self) -> String {
        match self.below(5) {
            0 => format!("{}# {}", self.space_or_none(), self.line()),
            1 => self.space_or_none().to_owned(),
            _ => self.line(),
        }
    }

    /// A line with a few characters changed.
    fn changed_line(&mut self) -> String {
        const CHARACTERS: [char; 36] = [
            ' ', '\t', '*', '/', ',', '-', '0', '7', '9', '?', '{', '}', '&', '=', '%', '+', '\'', '"', '\\', ':', '_',
            '#', 'a', 'Z', '[', ']', '\r', '\u{a0}', '\u{2028}', '\u{feff}', '\u{85}', 'é', '🐘', '.', '\u{b}',
            '\u{1}',
        ];
        let mut line: Vec<char> = self.line().chars().collect();
        for _ in 0..=self.below(3) {
            let at = self.below(line.len());
            let character = CHARACTERS[self.below(CHARACTERS.len())];
            match self.below(4) {
                0 => line[at] = character,
                1 => line.insert(at, line[at]),
                2 => line.insert(at, character),
                _ if line.len() > 1 => drop(line.remove(at)),
                _ => {}
            }
        }
        line.into_iter().collect()
    }

    fn line(&mut self) -> String {
        let mut line = self.space_or_none().to_owned();
        for (min, max) in [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)] {
            line += &self.field(min, max, 60);
            line += self.space();
        }
        line += &self.task();
        if self.once_in(2) {
            line += self.space();
            line += &self.options();
        }
        if self.once_in(2) {
            line += self.space();
            line += &self.object(0);
        }
        line + self.space_or_none()
    }

    fn right_fields(&mut self) -> String {
        [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)].map(|(min, max)| self.field(min, max, usize::MAX)).join(" ")
    }

    /// Wrong once in `wrong`.
    fn field(&mut self, min: usize, max: usize, wrong: usize) -> String {
        if wrong < usize::MAX && self.once_in(wrong) {
            let wrongs = [
                "60",
                "99999999999999999999",
                "5-5",
                "5-1",
                "*/0",
                "1,,2",
                "-",
                "/",
                "**",
                "1-",
                "*/",
                "*-5",
                "1-2-3",
                "0-60",
                "8-9",
                ",",
                "0",
                "00",
                "*/99999999999999999999",
                "1-99999999999",
                "0-1",
                "12-13",
            ];
            return self.one_of(&wrongs).to_owned();
        }
        let parts = if self.once_in(3) { 1 + self.below(4) } else { 1 };
        let part = |lot: &mut Lot| match lot.below(6) {
            0 | 1 => "*".to_owned(),
            2 => format!("*/{}", 1 + lot.below(max + 2)),
            3 => {
                let start = min + lot.below(max - min);
                format!("{start}-{}", start + 1 + lot.below(max - start))
            }
            4 => format!("{:03}", min + lot.below(max - min + 1)),
            _ => (min + lot.below(max - min + 1)).to_string(),
        };
        (0..parts).map(|_| part(self)).collect::<Vec<_>>().join(",")
    }

    fn space(&mut self) -> &'static str {
        match self.below(12) {
            0 => self.one_of(&["\t", "  ", "\u{a0}", "\u{3000}", "\u{2003}", "\u{feff}", "\u{b}\u{c}", " \u{1680} "]),
            1 if self.once_in(6) => self.one_of(&["\r", "\u{2028}", "\u{85}", "\u{180e}", "\u{200b}"]),
            _ => " ",
        }
    }

    fn space_or_none(&mut self) -> &'static str {
        if self.once_in(6) { self.space() } else { "" }
    }

    fn task(&mut self) -> String {
        match self.below(20) {
            0 => self.one_of(&["1a", "-a", "a.b", "é", "", "a?b", "a{", "\"a\"", "*", ":a"]).to_owned(),
            1 => "t".repeat(120 + self.below(16)),
            2 => self.one_of(&["mon", "jan", "sun-sat/2", "MON"]).to_owned(),
            _ => self.one_of(&["a", "_", "task", "user:email", "reports/daily-sum_2", "A9", "x-"]).to_owned(),
        }
    }

    fn options(&mut self) -> String {
        let keys = ["id", "fill", "max", "queue", "priority", "jobKey", "jobKeyMode"];
        let some = 1 + self.below(4);
        let mut pairs = Vec::new();
        for key in keys {
            if self.once_in(some) {
                pairs.push(self.option(key));
            }
        }
        if self.once_in(15) {
            pairs.push(self.odd_option());
        }
        let separator = if self.once_in(20) { "&&" } else { "&" };
        let end = if self.once_in(20) { "&" } else { "" };
        let start = if self.once_in(40) { "" } else { "?" };
        format!("{start}{}{end}", pairs.join(separator))
    }

    fn option(&mut self, key: &str) -> String {
        let (usual, odd): (&[&str], &[&str]) = match key {
            "id" => (&["a", "_b-2", "my-id", "Z"], &["1a", "a:b", "", "%61b", "a+b", "é"]),
            "fill" => (
                &["2d", "4w3d2h1m", "30s", "1h30m", "1h1h", "0s", "007d"],
                &["5", "d", "", "1.5h", "5D", "3d+", "1d%32h", "4294967295s", "4294967296s", "99999999999999999999w"],
            ),
            "max" => (
                &["1", "5", "25", "007", "32767", "%31"],
                &["0", "32768", "-1", "+1", "x", "", "1.5", "99999999999999999999999"],
            ),
            "queue" => (&["q", "a:b-c_d", "9", "-", "%71"], &["a/b", "", "a+b", "é"]),
            "priority" => (
                &["0", "-5", "12", "32767", "-32768", "-0", "007", "-%31"],
                &["32768", "-32769", "--1", "", "1.5", "+3", "-"],
            ),
            "jobKeyMode" => (&["replace", "preserve_run_at", "preserve%5frun_at"], &["unsafe_dedupe", "", "Replace"]),
            _ => return format!("jobKey={}", self.job_key()),
        };
        if key == "queue" && self.once_in(12) {
            return format!("queue={}", "q".repeat(126 + self.below(5)));
        }
        let value = if self.once_in(15) { self.one_of(odd) } else { self.one_of(usual) };
        if self.once_in(60) { key.to_owned() } else { format!("{key}={value}") }
    }

    /// Odd keys, and keys that are there already.
    fn odd_option(&mut self) -> String {
        let odd = [
            "=",
            "a=b",
            "ID=a",
            "%69d=x",
            "i%64=y",
            "id%3Dx",
            "max==5",
            "constructor=1",
            "__proto__=1",
            "%",
            "max=5",
            "jobKey=k",
        ];
        self.one_of(&odd).to_owned()
    }

    fn job_key(&mut self) -> String {
        if self.once_in(20) {
            return "k".repeat(508 + self.below(8));
        }
        if self.once_in(10) {
            return self.one_of(&["", "%00", "a%0Ab", "%0d", "%E2%80%A8", "\0"]).to_owned();
        }
        let pieces = [
            "a",
            "b",
            "+",
            "%20",
            "%2B",
            "%26",
            "%3d",
            "%25",
            "%",
            "%%",
            "%z",
            "%4",
            "%zz",
            "%C3%A9",
            "%c3",
            "%A9",
            "%ff",
            "%F0%9F%90%98",
            "%ED%A0%80",
            "é",
            "🐘",
            "ũ",
            "=",
            "?",
            "{",
            "}",
            "'",
            "\"",
            ":/",
            "\\",
        ];
        (0..=self.below(5)).map(|_| self.one_of(&pieces)).collect()
    }

    fn object(&mut self, level: usize) -> String {
        if level == 0 && self.once_in(60) {
            let depth = 95 + self.below(12);
            return format!("{{a:{}1{}}}", "[".repeat(depth), "]".repeat(depth));
        }
        let members: Vec<String> = (0..self.below(4))
            .map(|_| {
                let keys = [
                    "a",
                    "b",
                    "$c",
                    "_",
                    "é",
                    "'a'",
                    "\"b c\"",
                    "''",
                    "\\u0061b",
                    "a1",
                    "1a",
                    "a-b",
                    "'\\x41'",
                    "null",
                    "'\\\n'",
                    "__proto__",
                    "\"__proto__\"",
                    "ℵ",
                    "a\\u200c",
                ];
                let key = if self.once_in(3) { self.one_of(&keys) } else { self.one_of(&keys[..6]) };
                format!("{key}{}:{}{}", self.space_or_none(), self.space_or_none(), self.value(level + 1))
            })
            .collect();
        let comma = if self.once_in(6) { "," } else { "" };
        let comment =
            if self.once_in(12) { self.one_of(&["/* x } */", "//", "/* ", "/**/", "/* **/", "/ "]) } else { "" };
        let after = if level == 0 && self.once_in(30) {
            self.one_of(&[" // }", "}", " /* } */", " x", " ?id=a", "//}"])
        } else {
            ""
        };
        format!("{{{}{comma}{comment}}}{after}", members.join(if self.once_in(8) { " , " } else { "," }))
    }

    fn value(&mut self, level: usize) -> String {
        let numbers = [
            "0",
            "-0",
            "1",
            "42",
            "-7",
            "+3",
            "1.5",
            ".5",
            "5.",
            "-.5",
            "+5.",
            "1e3",
            "1E-2",
            "5.e1",
            ".5e+2",
            "0x1F",
            "-0XfF",
            "1e999",
            "-1e999",
            "9007199254740993",
            "18446744073709551616",
            "0.1",
            "1e21",
            "Infinity",
            "-Infinity",
            "+Infinity",
            "NaN",
            "-NaN",
            "0.0",
            "-0.0",
            "0e5",
            "5e-324",
            "123456789012345678901234567890",
            "0xffffffffffffffffffff",
        ];
        let wrong = [
            "",
            "01",
            "-00",
            "1.2.3",
            "1e",
            "1e+",
            ".",
            "+ 1",
            "0x",
            "0xg",
            "--1",
            "infinity",
            "nan",
            "True",
            "undefined",
            "nul",
            "truex",
            "'a",
            "a'",
            "'\\1'",
            "'\\x4'",
            "'\\u004'",
            "'\\01'",
            "b",
            "[1,,2]",
            "[,]",
            "{,}",
            "[1",
            "`a`",
            "'\\ud800'",
            "'\\udc00\\ud83d'",
            "'\\u0000'",
            "'\\0'",
            "1_000",
            "0b1",
            "1n",
            "+'a'",
            "-",
            "1e5-3",
        ];
        let strings = [
            "''",
            "\"\"",
            "'a b'",
            "\"it's\"",
            "'\"'",
            "'\\'\\\"\\\\'",
            "'\\b\\f\\n\\r\\t\\v'",
            "'\\x41\\u0042'",
            "'\\ud83d\\udc18'",
            "'\\q\\/'",
            "'é🐘'",
            "'}'",
            "'{'",
            "'// no comment'",
            "'?id=a'",
            "'\t'",
            "'\\\u{2028}'",
            "'\u{2029}'",
            "'\u{1}'",
            "'\u{7f}'",
        ];
        match self.below(if level > 3 { 8 } else { 10 }) {
            0 => self.one_of(&["null", "true", "false"]).to_owned(),
            1..4 => self.one_of(&numbers).to_owned(),
            4..7 => self.one_of(&strings).to_owned(),
            7 => if self.once_in(3) { self.one_of(&wrong) } else { "1" }.to_owned(),
            8 => self.object(level),
            _ => {
                let values: Vec<String> = (0..self.below(4)).map(|_| self.value(level + 1)).collect();
                format!("[{}{}]", values.join(","), if self.once_in(5) && !values.is_empty() { "," } else { "" })
            }
        }
    }
}
