/** The backend's file for this machine, or null where the package has none. */
export const path: string | null;
/** Settings by their keys, before getLlama(): settings({mode: "recommended", budget: 0.25}). */
export function settings(values: Record<string, string | number | boolean | number[] | object>): void;
