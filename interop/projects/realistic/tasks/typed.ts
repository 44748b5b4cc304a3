import type { JobHelpers } from "graphile-worker";

interface Payload {
  count: number;
}

export default async (payload: Payload, { query }: JobHelpers): Promise<void> => {
  const doubled: number = payload.count * 2;
  await query("insert into noted (task, value) values ('typed', $1)", [JSON.stringify({ doubled })]);
};
