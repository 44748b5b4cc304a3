//! The payload of a line.

use crate::{complaint, item};
use serde_json::{Value, json};

fn payload(text: &str) -> Value {
    item(&format!("* * * * * task {text}")).payload.map_or(Value::Null, Value::Object)
}

#[test]
fn json5_is_parsed_as_javascript_does() {
    for (text, expected) in [
        ("{}", json!({})),
        ("{a:1,'b':2,\"c\":3,$d_é:4,}", json!({"a": 1, "b": 2, "c": 3, "$d_é": 4})),
        ("{a: [1, 'two', [], {},], b: null, c: true}", json!({"a": [1, "two", [], {}], "b": null, "c": true})),
        (
            "{a: .5, b: 5., c: +1, d: -0x1F, e: 1e3, f: -1.5E-2}",
            json!({"a": 0.5, "b": 5, "c": 1, "d": -31, "e": 1000, "f": -0.015}),
        ),
        (
            "{a: 1.0, b: -0, c: 1e21, d: 9007199254740993}",
            json!({"a": 1, "b": 0, "c": 1e21, "d": 9_007_199_254_740_993_u64}),
        ),
        ("{a: Infinity, b: -Infinity, c: NaN}", json!({"a": null, "b": null, "c": null})),
        (
            r"{a: '\x41\u0042\n\'\q\
}'}",
            json!(null),
        ),
        (r#"{a: '\x41\u0042\n\'\q\uD83D\uDC18', b: "it's"}"#, json!({"a": "AB\n'q🐘", "b": "it's"})),
        ("{a: 1 /* one } */, // }\t}", json!(null)),
        ("{a: 1 /* one } */ } // }", json!({"a": 1})),
        ("{a: 1, a: 2}", json!({"a": 2})),
        (r#"{a: {"$serde_json::private::RawValue": "[1]"}}"#, json!({"a": {"$serde_json::private::RawValue": "[1]"}})),
    ] {
        if expected.is_null() {
            complaint(&format!("* * * * * task {text}"));
        } else {
            assert_eq!(payload(text), expected, "{text}");
        }
    }
}

#[test]
fn nul_and_lone_surrogates_are_rejected() {
    assert!(complaint(r"* * * * * task {a: '\0'}").contains("payload contains a NUL character"));
    assert!(complaint(r"* * * * * task {a: {'\u0000': 1}}").contains("payload contains a NUL character"));
    complaint(r"* * * * * task {a: '\uD800'}");
}

#[test]
fn nesting_is_limited_to_a_hundred_levels() {
    let nested = |levels: usize| format!("* * * * * task {{a: {}1{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1));
    item(&nested(100));
    assert!(complaint(&nested(101)).contains("payload is nested more than 100 levels deep"));
    assert!(complaint(&nested(1_000_000)).contains("payload is nested more than 100 levels deep"));
    let open = format!("* * * * * task {}}}", "{a:".repeat(1_000_000));
    assert!(complaint(&open).contains("payload is nested more than 100 levels deep"));
}
